"""What was probably meant: by meaning, by whole words, and by letters last."""

from __future__ import annotations

import pytest

from covey.algorithms import ALGORITHMS, algorithm_schemas
from covey.cli.main import main
from covey.config import compose, recipe_names
from covey.config.compose import GROUPS
from covey.config.settings import all_keys
from covey.config.unknown import MEANINGS as SETTINGS
from covey.errors import MEANINGS, InputError, nearest
from covey.rewards.builtin import REWARDS

COMMANDS = (
    *("train", "sft", "eval", "sample", "serve", "export", "data", "config", "simulate", "slurm"),
    *("algorithms", "dash", "report", "runs", "watch", "doctor", "push"),
)
NAMES = {
    "command": COMMANDS,
    "algorithm": ALGORITHMS,
    "reward": REWARDS,
    "agent": [*GROUPS["agent"], "module:function"],
    "recipe": recipe_names(),
}


def suggested(setting: str, algorithm: str = "grpo") -> list[str]:
    """The settings that the error about an unknown one suggests."""
    with pytest.raises(InputError, match="unknown setting") as error:
        compose([f"algorithm={algorithm}", f"{setting}=1"], algorithms=algorithm_schemas())
    lines = [line.split() for line in str(error.value).splitlines()]
    found = [line[3] if line[0] == "did" else line[1] for line in lines if line[0] in ("did", "or")]
    return [name.removesuffix("?") for name in found]


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("batch_size", ["data.train_batch_size", "learner.mini_batch_size"]),
        ("epochs", ["loop.total_epochs", "learner.epochs"]),
        ("num_epochs", ["loop.total_epochs", "learner.epochs"]),
        ("max_length", ["rollout.max_tokens"]),
        ("max_new_tokens", ["rollout.max_tokens"]),
        ("n_samples", ["rollout.group_size"]),
        ("num_rollouts", ["rollout.group_size"]),
        ("gpus", ["cluster.learner_devices", "cluster.rollout_devices"]),
        ("lora_r", ["model.lora.rank"]),
        ("lora_rank", ["model.lora.rank"]),
        ("warmup", ["learner.warmup_steps"]),
        ("dataset", ["data.name"]),
        ("test_data", ["data.val_files"]),
        ("steps", ["loop.total_steps"]),
        ("kl", ["algorithm.kl_coef"]),
        ("wandb", ["logging.to"]),
        ("save_interval", ["loop.save_every"]),
        ("timeout", ["agent.max_seconds", "agent.tool_seconds", "reward.seconds"]),
        ("optim", ["learner.optimizer", "learner.lr", "learner.weight_decay"]),
        ("optimizer", ["learner.optimizer"]),
        # Arguments of TRL and verl that only covey.trl takes, or nothing does.
        ("vllm_mode", ["rollout.name"]),
        ("use_cpu", ["model.device"]),
        ("load_in_4bit", ["model.quantization"]),
        ("importance_sampling_level", ["algorithm.loss"]),
        ("vllm_importance_sampling_mode", ["algorithm.correction"]),
        ("vllm_importance_sampling_clip_max", ["algorithm.correction_cap"]),
        ("router_replay", ["learner.replay_routing"]),
        ("partial_rollout", ["mode.update"]),
        ("teacher_model_name_or_path", ["teacher.name"]),
        # With a section that exists: its own settings come first.
        ("learner.learning_rate", ["learner.lr"]),
        ("learner.batch_size", ["learner.mini_batch_size"]),
        ("data.batch_size", ["data.train_batch_size", "learner.mini_batch_size"]),
        ("data.path", ["data.train_files"]),
        ("rollout.n_samples", ["rollout.group_size"]),
        ("eval.steps", ["eval.every"]),
        ("loop.save_steps", ["loop.save_every"]),
        ("trainer.epochs", ["loop.total_epochs", "learner.epochs"]),
        # Words of the help texts.
        ("adapters", ["model.lora.rank"]),
        ("recompute_activations", ["model.gradient_checkpointing"]),
        ("decoded_together", ["rollout.max_sequences"]),
        # A slip of the finger stays in the vocabulary that it was made in.
        ("learner.lrr", ["learner.lr"]),
        ("optimizr.lr", ["optimizer.lr"]),
        ("num_generation", ["num_generations"]),
        ("data.option.count", ["data.options.count"]),
        ("something.else", []),
    ],
)
def test_settings_by_meaning(setting: str, meant: list[str]) -> None:
    found = suggested(setting)
    assert found[: len(meant)] == meant and bool(found) == bool(meant)


def test_a_meaning_that_the_chosen_algorithm_lacks_is_passed_over() -> None:
    assert suggested("kl_weight", "grpo") == ["algorithm.kl_coef"]
    assert suggested("kl_weight", "gvpo") == ["algorithm.beta"]


def test_several_suggestions_come_with_what_tells_them_apart() -> None:
    with pytest.raises(InputError) as error:
        compose(["epochs=3"], algorithms=algorithm_schemas())
    assert str(error.value).splitlines()[1:3] == [
        "  did you mean   loop.total_epochs  "
        "(default null; passes over the training tasks; if total_steps is null too: 1)",
        "  or             learner.epochs  (default 1; passes over each step's samples)?",
    ]


def test_every_meaning_of_a_setting_exists() -> None:
    known = all_keys(algorithm_schemas())
    assert [name for names in SETTINGS.values() for name in names if name not in known] == []


@pytest.mark.parametrize("kind", NAMES)
def test_every_meaning_of_a_name_exists(kind: str) -> None:
    assert MEANINGS.keys() == NAMES.keys()
    assert set(MEANINGS[kind].values()) <= set(NAMES[kind])
    assert not set(MEANINGS[kind]) & set(NAMES[kind])  # a name that exists is never guessed


@pytest.mark.parametrize(
    ("kind", "word", "meant"),
    [
        ("command", "evaluate", "eval"),
        ("command", "run", "train"),
        ("command", "ls", "runs"),
        ("command", "trian", "train"),
        ("command", "xyzzy", None),
        ("algorithm", "reinforce", "reinforce_plus_plus"),
        ("algorithm", "rlhf", "ppo"),
        ("reward", "accuracy", "exact"),
        ("reward", "f1", "qa_f1_reward"),
        ("reward", "llm-judge", "judge"),
        ("reward", "exat", "exact"),
        ("agent", "toolCalling", "hf"),
        ("agent", "environment", "module:function"),
        ("recipe", "quickstart", "demo"),
        ("recipe", "gsm8k", "grpo_gsm8k"),  # a whole word of its name
        ("recipe", "qwen3", "dgdo_deepscaler_qwen3_4b"),
    ],
)
def test_names_by_meaning(kind: str, word: str, meant: str | None) -> None:
    assert nearest(word, NAMES[kind], kind) == meant


def test_an_unknown_command_suggests_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "x"]) == 2
    assert "unknown command  evaluate\n  did you mean   covey eval?" in capsys.readouterr().err
