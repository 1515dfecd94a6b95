"""Which known name was probably meant: by meaning first, by whole words, and by letters last."""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

TYPO, NEAR = 0.8, 0.6  # likeness of letters: a slip of the finger; the last resort

# Kind of name → what people call things elsewhere → what they are called here. Names that do not exist are ignored.
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "command": {
        **dict.fromkeys(("run", "start", "fit", "launch", "rl", "finetune", "tune", "learn", "grpo", "gvpo"), "train"),
        **dict.fromkeys(("pretrain", "imitate", "supervised", "demonstrations"), "sft"),
        **dict.fromkeys(("evaluate", "evaluation", "test", "score", "benchmark", "validate", "compare"), "eval"),
        **dict.fromkeys(("generate", "chat", "infer", "inference", "predict", "ask", "complete", "talk"), "sample"),
        **dict.fromkeys(("server", "api", "endpoint", "host", "gateway", "proxy"), "serve"),
        **dict.fromkeys(("save", "convert", "merge", "push", "upload"), "export"),
        **dict.fromkeys(("dataset", "datasets", "download", "prepare", "fetch"), "data"),
        **dict.fromkeys(("settings", "options", "explain", "parameters", "params", "cfg"), "config"),
        **dict.fromkeys(("estimate", "plan", "cost", "dryrun", "forecast"), "simulate"),
        **dict.fromkeys(("sbatch", "submit", "job", "srun"), "slurm"),
        **dict.fromkeys(("algorithm", "algos", "algo", "losses", "methods"), "algorithms"),
        **dict.fromkeys(("dashboard", "ui", "web", "board", "tensorboard", "view", "show", "plot", "page"), "dash"),
        **dict.fromkeys(("summary", "html", "summarize"), "report"),
        **dict.fromkeys(("ls", "list", "ps", "history", "status", "jobs", "experiments", "dir"), "runs"),
        **dict.fromkeys(("log", "logs", "tail", "attach", "follow", "monitor", "progress"), "watch"),
        **dict.fromkeys(("check", "info", "env", "diagnose", "debug", "health", "setup", "system"), "doctor"),
    },
    "algorithm": {
        **dict.fromkeys(("rlhf", "actor_critic", "a2c", "trpo"), "ppo"),
        **dict.fromkeys(("reinforce", "reinforce_pp", "rpp", "policy_gradient", "pg", "vpg"), "reinforce_plus_plus"),
        **dict.fromkeys(("r1", "deepseek", "group_relative", "grpo_trainer"), "grpo"),
        **dict.fromkeys(("drgrpo", "unbiased_grpo"), "dr_grpo"),
        **dict.fromkeys(("leave_one_out", "loo"), "rloo"),
        **dict.fromkeys(("passk", "pass_at_k"), "grpo_passk"),
        **dict.fromkeys(("sequence_ratio", "gspo_token"), "gspo"),
    },
    "reward": {
        **dict.fromkeys(("accuracy", "exact_match", "em", "match", "equal", "correct", "correctness"), "exact"),
        **dict.fromkeys(("math", "maths", "gsm8k", "boxed", "latex", "math_reward", "verify"), "math_verify"),
        **dict.fromkeys(("f1", "qa"), "qa_f1_reward"),
        **dict.fromkeys(("code", "unit_tests", "tests", "python", "mbpp", "humaneval"), "code_reward"),
        **dict.fromkeys(("llm", "llm_judge", "llm_as_judge", "grader", "rubric"), "judge"),
        **dict.fromkeys(("rm", "preference", "classifier", "score_model"), "reward_model"),
        **dict.fromkeys(("tags", "regex", "structure", "think", "format_reward"), "format"),
        **dict.fromkeys(("brevity", "short", "concise", "len", "overlong"), "length"),
        **dict.fromkeys(("ngram", "repeat"), "repetition"),
        **dict.fromkeys(("environment", "env"), "given"),
        **dict.fromkeys(("instructions", "instruction_following"), "ifeval"),
        **dict.fromkeys(("function_call", "tool_calls"), "tool_call"),
        **dict.fromkeys(("int", "integer", "float", "numeric"), "number"),
    },
    "agent": {
        **dict.fromkeys(("single_turn", "none", "default", "plain", "qa", "simple"), "chat"),
        **dict.fromkeys(("tool", "tools", "tool_calling", "function_calling", "functions", "huggingface"), "hf"),
        **dict.fromkeys(("python", "interpreter", "code_interpreter", "sandbox", "coder"), "code"),
        **dict.fromkeys(("agentflow", "planner", "multi_agent", "workflow"), "flow"),
        **dict.fromkeys(("openai", "http", "api", "external", "server", "program", "langgraph"), "gateway"),
        **dict.fromkeys(("prime", "prime_rl"), "verifiers"),
        **dict.fromkeys(("env", "environment", "gym", "multi_turn", "custom", "own"), "module:function"),
    },
    "recipe": {
        **dict.fromkeys(("first", "quickstart", "tutorial", "toy", "hello", "example"), "demo"),
        **dict.fromkeys(("tool", "tools", "tool_use"), "calculator"),
    },
}


def nearest(word: str, known: Iterable[str], kind: str = "") -> str | None:
    """The known word that was probably meant, if there is one. `kind` chooses a table of meanings."""
    names = list(known)
    if (meant := MEANINGS.get(kind, {}).get(normal(word))) in names:
        return meant
    for guess in (alike(word, names, TYPO), _by_words(word, names), alike(word, names, NEAR)):
        if guess is not None:
            return guess
    return None


def normal(word: str) -> str:
    return "_".join(words_of(word))


def words_of(name: str) -> list[str]:
    """`maxNewTokens`, `max-new-tokens`, `max.new_tokens` → max, new, tokens."""
    return [part for part in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) if part]


def alike(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """The name whose letters are most like a word's."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def _by_words(word: str, names: list[str]) -> str | None:
    """The shortest name that has all words of the one given."""
    asked = set(words_of(word))
    found = [name for name in names if asked and asked <= set(words_of(name))]
    return min(found, key=lambda name: (len(words_of(name)), len(name)), default=None)


# -- A user's mistake, told so that it can be mended: what is wrong, where, and the fix --------------------------------

FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .+\n?(.*)', re.MULTILINE)  # of a traceback, as Python writes it


class InputError(ValueError):
    """Wrong input of the user's. The command line prints its text as it is and starts nothing."""


class Absent(InputError):
    """Something that is not on this machine but may be on the one the run is for: a file, a model of the hub."""


class RunFailed(RuntimeError):
    """A run that had started could not go on; its text says why and what to try."""


class LearnerLost(RunFailed):
    """A process of the learner died, and with it what was learned since the last checkpoint."""


class EpisodeError(Exception):
    """What the infrastructure did wrong in one episode, which is then left out and counted by `cause`."""

    cause = "agent"


class NamedFailure(EpisodeError):
    """One whose cause is said when it is raised."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)  # both: an exception is pickled by its arguments
        self.cause = cause
        self.message = message

    def __str__(self) -> str:
        return self.message


def said(error: BaseException) -> str:
    """An error of the user's code: its type, its message, and the line of that code it was raised at."""
    error = first_error(error)
    text = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
    return with_place(text, place_of(error))


def with_place(text: str, place: str) -> str:
    if not place:
        return text
    return f"{text}\n  at {place}" if "\n" in text else f"{text} at {place}"


def message_of(error: BaseException) -> str:
    """An error's text. That of a SystemExit is only a number; an exception class of the user's may raise in __str__."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def place_of(error: BaseException) -> str:
    """`my_rewards.py, line 12: return int(text)`: the innermost line of the user's own code; empty where an error did
    not pass through any."""
    frames = traceback.extract_tb(first_error(error).__traceback__)
    return _place([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def place_in(trace: str) -> str:
    """The same from the text of a traceback, where that is all there is."""
    return _place([(name, int(number), line.strip()) for name, number, line in FRAME.findall(trace)])


def _place(frames: Sequence[tuple[str, int, str]]) -> str:
    """`frames`: file, line and source line of each, the innermost last."""
    found = [frame for frame in frames if _is_the_users(frame[0])]
    if not found:
        return ""
    name, number, line = found[-1]
    path = Path(name)
    with suppress(OSError, ValueError):  # a folder that was deleted; a file elsewhere, which is named in full
        path = path.relative_to(Path.cwd())
    return f"{path}, line {number}" + (f": {line}" if line else "")


_users_code: set[str] = set()  # installed packages and modules that the user named


def count_as_users(path: Path) -> None:
    """An installed package, or a module, that the user named (`module:function`) is theirs, as a file of theirs is."""
    _users_code.add(str(path))
    _is_the_users.cache_clear()


@cache
def _is_the_users(filename: str) -> bool:
    """Neither Python's, nor Covey's, nor a library's."""
    if filename.startswith("<"):
        return filename.startswith(("<ipython-input", "<stdin>"))
    others = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return _lies_in(filename, _users_code) or not _lies_in(filename, (*others, str(Path(__file__).parent)))


def _lies_in(filename: str, places: Iterable[str]) -> bool:
    return any(filename == place or filename.startswith(f"{place}{os.sep}") for place in places)


def first_error(error: BaseException) -> BaseException:
    """The error inside the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def unknown(kind: str, word: str, known: Iterable[str], prefix: str = "") -> InputError:
    """`unknown reward  exat` with what was probably meant and the list to choose from. `prefix`: what the name is typed
    after, shown with the suggestion."""
    names = sorted(known)
    lines = [f"unknown {kind}  {word}"]
    if guess := nearest(word, names, kind):
        lines.append(f"  did you mean   {prefix}{guess}?")
    lines.append(f"  known: {', '.join(names)}")
    return InputError("\n".join(lines))
