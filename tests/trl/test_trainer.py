"""What GRPOConfig and GRPOTrainer refuse, report and hand on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.errors import InputError
from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl.inputs import read_rows, translate_adapter, translate_rewards
from tests.conftest import byte_tokenizer
from tests.rewards.test_reward_model import chatty  # noqa: F401  (a tiny classifier)

ROWS = [{"prompt": f"{i}", "solution": f"{i}"} for i in range(4)]
SMALL: dict[str, Any] = {"max_completion_length": 4, "max_steps": 1, "num_generations": 4, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def long(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"num_generation\n.*did you mean   num_generations\?"):
        GRPOConfig(num_generation=4)  # type: ignore[call-arg]


def test_arguments_of_transformers_that_are_not_there() -> None:
    with pytest.raises(InputError, match="ddp_backend is not supported"):
        GRPOConfig(ddp_backend="nccl")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"push_to_hub": True}, "save_model"),
        ({"loss_type": "dpo"}, "loss_type=dpo is not supported; supported: grpo"),
        ({"vllm_mode": "server"}, "colocate"),
        ({"optim": "adafactor"}, "optim=adafactor"),
        ({"generation_batch_size": 12}, "multiple of per_device_train_batch_size=8"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "contradict"),
        ({"gradient_accumulation_steps": 0}, "at least 1"),
    ],
)
def test_what_is_not_supported_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GRPOConfig(**arguments)


def test_arguments_without_effect_are_reported_in_a_line_each() -> None:
    quiet = GRPOConfig("out", logging_steps=10, log_completions=False)  # their defaults
    assert list(quiet.remarks()) == []
    loud = GRPOConfig("out", logging_steps=1, log_completions=True)
    found = list(loud.remarks())
    assert [line.split(" ")[0] for line in found] == ["logging_steps=1", "log_completions=True"]
    assert all("has no effect" in line and "\n" not in line for line in found)


def test_a_reward_that_asks_for_what_is_not_there(tiny_model_folder: Path) -> None:
    def graded(completions: list[str], answer: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def logged(completions: list[str], log_metric: Any) -> list[float]:
        return [0.0] * len(completions)

    for function, message in ((graded, r"`answer`, which train_dataset\[0\]"), (logged, "`log_metric`")):
        with pytest.raises(InputError, match=message):
            GRPOTrainer(str(tiny_model_folder), function, GRPOConfig("out", **SMALL), ROWS)


def test_rewards_get_names_and_weights() -> None:
    found = translate_rewards([long, long, lambda completions: [], "exact"], [1, 2, 3, 4], conversational=False)
    assert found.weights == {"long": 1, "long_2": 2, "lambda": 3, "exact": 4}
    with pytest.raises(InputError, match="2 weights for 1"):
        translate_rewards(long, [1.0, 2.0], conversational=False)
    with pytest.raises(InputError, match="empty"):
        translate_rewards([], None, conversational=False)


def test_a_reward_model_by_its_folder(tiny_model_folder: Path, chatty: Path) -> None:  # noqa: F811
    trainer = GRPOTrainer(
        str(tiny_model_folder),
        [str(chatty), long],
        GRPOConfig("out", per_device_train_batch_size=4, **SMALL),
        [{"prompt": [{"role": "user", "content": "a"}]}],
    )
    result = trainer.train()
    assert {"reward/reward_model/mean", "reward/long/mean"} <= set(result.metrics)


def test_rows_that_are_no_prompts() -> None:
    for rows, message in (
        ([], "no rows"),
        ([{"prompts": "a"}], r"\[0\] has no prompt(.|\n)*prompts"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], "use one form"),
        ([{"prompt": [{"content": "b"}]}], "no role"),
        ([{"prompt": 3}], "text or a list of messages"),
        ([{"prompt": "a", "image": object()}], "image: covey.trl takes no images"),
        ({"train": [], "test": []}, "several data sets"),
        ("trl-lib/tldr", "is a string"),
    ):
        with pytest.raises(InputError, match=message):
            read_rows(rows, "train_dataset")


def test_unused_columns_are_removed_where_asked() -> None:
    (task,) = read_rows(ROWS[:1], "train_dataset", only_prompts=True).tasks
    assert dict(task.columns) == {}
    (task,) = read_rows(ROWS[:1], "train_dataset").tasks
    assert dict(task.columns) == {"solution": "0"}


def test_adapters() -> None:
    config = SimpleNamespace(r=8, lora_alpha=16, target_modules={"v_proj", "q_proj"}, lora_dropout=0.1, use_dora=False)
    settings, remarks = translate_adapter(config)
    assert settings == {"lora": {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}}
    assert len(remarks) == 1 and "lora_dropout" in remarks[0]
    config.use_dora = True
    with pytest.raises(InputError, match="use_dora"):
        translate_adapter(config)


def test_arguments_of_the_trainer(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    with pytest.raises(InputError, match=r"tools=\.\.\.\) is not supported(.|\n)*agent=hf"):
        GRPOTrainer(model, long, train_dataset=ROWS, tools=[long])
    with pytest.raises(TypeError, match="datset"):
        GRPOTrainer(model, long, train_datset=ROWS)
    with pytest.raises(InputError, match="train_dataset is missing"):
        GRPOTrainer(model, long)
    with pytest.raises(InputError, match="SimpleNamespace"):
        GRPOTrainer(model, long, SimpleNamespace(), ROWS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="name, a folder or a transformers model"):
        GRPOTrainer(3, long, GRPOConfig("out", **SMALL), ROWS)


def test_a_tokenizer_with_another_vocabulary(tiny_model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(InputError, match="another vocabulary"):
        GRPOTrainer(str(tiny_model_folder), long, GRPOConfig("out", **SMALL), ROWS, processing_class=tokenizer)


def test_evaluation_needs_rows_and_the_model_training(tiny_model_folder: Path) -> None:
    trainer = GRPOTrainer(str(tiny_model_folder), long, GRPOConfig("out", **SMALL), ROWS)
    with pytest.raises(InputError, match="eval_dataset"):
        trainer.evaluate()
    with pytest.raises(InputError, match="train"):
        _ = trainer.model


def test_a_run_starts_anew_unless_it_is_to_be_resumed(tiny_model_folder: Path) -> None:
    """As in TRL: train() begins at the start, with resume_from_checkpoint it goes on."""
    arguments = SMALL | {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = GRPOTrainer(str(tiny_model_folder), long, GRPOConfig("out", **arguments), ROWS)
    trainer.train()
    assert trainer.run is not None
    first = trainer.run.path
    info = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps(info | {"status": "interrupted"}))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.run.path == first and trainer.run.first_step == 2
    trainer.train()
    assert trainer.run.path != first and trainer.run.first_step == 0


def test_the_guide_names_every_argument() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/from-trl.md").read_text()
    assert [field.name for field in dataclasses.fields(GRPOConfig) if f"`{field.name}`" not in guide] == []


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_tokenizer_begins_every_text(begins: bool) -> None:
    """Llama's puts a token before a text that is not in any template; the byte tokenizer of the tests has none."""
    from tokenizers.processors import TemplateProcessing

    from covey.rollout.rendering import Renderer
    from covey.rollout.templates import use_template

    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    if begins:
        mark = ("<|im_start|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[mark])
    use_template(tokenizer, "none")
    found = Renderer(tokenizer).prompt([{"role": "user", "content": " ab\n"}])
    assert list(found) == tokenizer(" ab\n")["input_ids"]
    assert (found[0] == tokenizer.bos_token_id) is begins
