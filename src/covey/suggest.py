"""Which known name was probably meant: by meaning first, by whole words, and by letters last."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

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
