"""Errors: exception types, suggestions for misspelt names, and the place in the user's code that raised an error."""

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

FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .+\n?(.*)', re.MULTILINE)  # in the text of a traceback
TYPO, NEAR = 0.8, 0.6  # similarity of spelling: a typo; the last resort

# Kind of name → names used elsewhere → names here. Names that do not exist are ignored.
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "command": {
        **dict.fromkeys(("run", "start", "fit", "launch", "rl", "finetune", "tune", "learn", "grpo", "gvpo"), "train"),
        **dict.fromkeys(("pretrain", "imitate", "supervised", "demonstrations"), "sft"),
        **dict.fromkeys(("evaluate", "evaluation", "test", "score", "benchmark", "validate", "compare"), "eval"),
        **dict.fromkeys(("generate", "chat", "infer", "inference", "predict", "ask", "complete", "talk"), "sample"),
        **dict.fromkeys(("server", "api", "endpoint", "host", "gateway", "proxy"), "serve"),
        **dict.fromkeys(("save", "convert", "merge", "gguf"), "export"),
        **dict.fromkeys(("upload", "publish", "hub", "push_to_hub", "release"), "push"),
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
        **dict.fromkeys(("max_rl", "maximum_likelihood", "mle"), "maxrl"),
        **dict.fromkeys(("rft", "rejection_sampling", "best_of_n", "expert_iteration"), "raft"),
        **dict.fromkeys(("iterative_dpo", "oaif", "preference"), "online_dpo"),
        **dict.fromkeys(("token_baseline", "optimal_baseline"), "otb"),
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
        **dict.fromkeys(("browser", "web", "computer", "computer_use", "screen", "vision"), "gui"),
        **dict.fromkeys(("env", "environment", "gym", "multi_turn", "custom", "own"), "module:function"),
    },
    "recipe": {
        **dict.fromkeys(("first", "quickstart", "tutorial", "toy", "hello", "example"), "demo"),
        **dict.fromkeys(("tool", "tools", "tool_use"), "calculator"),
    },
}


def nearest(word: str, known: Iterable[str], kind: str = "") -> str | None:
    """The known word that was probably meant: by meaning (`kind` selects a table), whole words, or similar spelling."""
    names = list(known)
    if (meant := MEANINGS.get(kind, {}).get(normalize(word))) in names:
        return meant
    for guess in (closest(word, names, TYPO), _containing_words(word, names), closest(word, names, NEAR)):
        if guess is not None:
            return guess
    return None


def normalize(word: str) -> str:
    return "_".join(split_words(word))


def split_words(name: str) -> list[str]:
    """`maxNewTokens`, `max-new-tokens`, `max.new_tokens` → max, new, tokens."""
    return [part for part in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) if part]


def closest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """The name with the most similar spelling."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def _containing_words(word: str, names: list[str]) -> str | None:
    """The shortest name that contains all words of `word`."""
    words = set(split_words(word))
    matches = [name for name in names if words and words <= set(split_words(name))]
    return min(matches, key=lambda name: (len(split_words(name)), len(name)), default=None)


# -- Exceptions --------------------------------------------------------------------------------------------------------


class InputError(ValueError):
    """The user's mistake. The message says what is wrong, where, and the fix; the command line prints it unchanged."""


class Absent(InputError):
    """A resource that is missing on this machine but may exist on another: a file, a GPU, a model of the hub."""


class RunFailed(RuntimeError):
    """A started run cannot continue. The message gives the reason and a fix."""


class LearnerLost(RunFailed):
    """A learner process died; the updates since the last checkpoint are lost."""


class EpisodeError(Exception):
    """An infrastructure failure in one episode. The episode is dropped and counted by `cause`."""

    cause = "agent"


class NamedFailure(EpisodeError):
    """A failure whose cause is an argument."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)  # both, because exceptions are pickled by their arguments
        self.cause = cause
        self.message = message

    def __str__(self) -> str:
        return self.message


def describe_error(error: BaseException) -> str:
    """Type and message of an error, and the line of the user's code that raised it."""
    error = first_error(error)
    text = f"{type(error).__name__}: {error_message(error)}".removesuffix(": ")
    return with_location(text, user_location(error))


def with_location(text: str, place: str) -> str:
    if not place:
        return text
    return f"{text}\n  at {place}" if "\n" in text else f"{text} at {place}"


def error_message(error: BaseException) -> str:
    """The text of an error. For SystemExit, str() is only a number; a user's exception may raise in __str__."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def user_location(error: BaseException) -> str:
    """`my_rewards.py, line 12: return int(text)`: the innermost frame in the user's code; empty if there is none."""
    frames = traceback.extract_tb(first_error(error).__traceback__)
    return _location([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def traceback_location(trace: str) -> str:
    """Like `user_location`, for the text of a traceback."""
    return _location([(name, int(number), line.strip()) for name, number, line in FRAME.findall(trace)])


def _location(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost frame in the user's code. `frames` are (file, line, source line), the innermost last."""
    user_frames = [frame for frame in frames if _is_user_code(frame[0])]
    if not user_frames:
        return ""
    name, number, line = user_frames[-1]
    path = Path(name)
    with suppress(OSError, ValueError):  # the working directory was deleted; the file is outside of it
        path = path.relative_to(Path.cwd())
    return f"{path}, line {number}" + (f": {line}" if line else "")


_user_code: set[str] = set()  # installed packages and modules that the user named


def mark_user_code(path: Path) -> None:
    """Count an installed package or module as the user's code, because a setting names it (`module:function`)."""
    _user_code.add(str(path))
    _is_user_code.cache_clear()


@cache
def _is_user_code(filename: str) -> bool:
    """Whether a file is not part of Python, Covey or an installed library."""
    if filename.startswith("<"):
        return filename.startswith(("<ipython-input", "<stdin>"))
    libraries = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return _is_inside(filename, _user_code) or not _is_inside(filename, (*libraries, str(Path(__file__).parent)))


def _is_inside(filename: str, places: Iterable[str]) -> bool:
    return any(filename == place or filename.startswith(f"{place}{os.sep}") for place in places)


def first_error(error: BaseException) -> BaseException:
    """The first error inside nested exception groups, which asyncio makes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def unknown(kind: str, word: str, known: Iterable[str], prefix: str = "") -> InputError:
    """The error `unknown reward  exat`, with a suggestion and all known names. `prefix` precedes the suggestion."""
    names = sorted(known)
    lines = [f"unknown {kind}  {word}"]
    if guess := nearest(word, names, kind):
        lines.append(f"  did you mean   {prefix}{guess}?")
    lines.append(f"  known: {', '.join(names)}")
    return InputError("\n".join(lines))
