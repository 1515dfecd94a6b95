"""Five scripts in the form that TRL's documentation prints, scaled down to a tiny model, and really run. Only their
imports are Covey's."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.trl import GRPOConfig, GRPOTrainer

SMALL = {"max_completion_length": 6, "learning_rate": 1e-2, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Dataset:
    """As much of a Hugging Face Dataset as anybody needs: rows, one after the other."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self)):
            yield {name: values[number] for name, values in self.columns.items()}


def metrics_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    assert trainer.run is not None
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def test_quick_start_with_texts(tiny_model_folder: Path) -> None:
    """A data set of texts and one reward function: the text goes to the model as it is."""
    seen: list[tuple[str, str]] = []

    def reward_num_unique_chars(prompts: list[str], completions: list[str], **kwargs: Any) -> list[int]:
        seen.extend(zip(prompts, completions, strict=True))
        return [len(set(completion)) for completion in completions]

    dataset = Dataset({"prompt": [f"The sky {i}" for i in range(4)]})
    trainer = GRPOTrainer(
        model=str(tiny_model_folder),
        reward_funcs=reward_num_unique_chars,
        args=GRPOConfig("quick-start", num_generations=4, max_steps=2, **SMALL),
        train_dataset=dataset,
    )
    before = trainer.processing_class.chat_template
    result = trainer.train()
    assert result.global_step == trainer.state.global_step == 2
    assert len(seen) == 2 * 8 and all(type(text) is str for pair in seen for text in pair)
    assert {prompt for prompt, _ in seen} == {f"The sky {i}" for i in range(4)}
    episode = json.loads((trainer.run.path / "episodes.jsonl").read_text().splitlines()[0])  # type: ignore[union-attr]
    assert "im_start" not in json.dumps(episode)
    trainer.save_model("saved")
    assert AutoTokenizer.from_pretrained("saved").chat_template == before


def test_format_and_ground_truth_of_conversations(tiny_model_folder: Path) -> None:
    """Prompts are messages, completions too; a column goes to the reward; rewards are weighed."""
    system = {"role": "system", "content": "Answer with a letter."}
    dataset = [
        {"prompt": [system, {"role": "user", "content": f"letter {i}?"}], "ground_truth": "abcd"[i]} for i in range(4)
    ]
    asked: list[list[dict[str, str]]] = []

    def format_reward_func(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(r"^[a-z]", content) else 0.0 for content in contents]

    def accuracy(
        completions: list[list[dict[str, str]]], prompts: list[list[dict[str, str]]], ground_truth: list[str], **_: Any
    ) -> list[float]:
        asked.extend(prompts)
        assert all(completion[0]["role"] == "assistant" and len(completion) == 1 for completion in completions)
        return [float(truth in c[0]["content"]) for c, truth in zip(completions, ground_truth, strict=True)]

    training_args = GRPOConfig(
        output_dir="conversations",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_steps=2,
        reward_weights=[0.5, 1.0],
        loss_type="dr_grpo",
        scale_rewards=False,
        beta=0.04,
        **SMALL,
    )
    trainer = GRPOTrainer(
        model=str(tiny_model_folder),
        reward_funcs=[format_reward_func, accuracy],
        args=training_args,
        train_dataset=dataset,
    )
    trainer.train()
    first = metrics_of(trainer)[0]
    assert {"reward/format_reward_func/mean", "reward/accuracy/mean", "kl/reference"} <= set(first)
    total = 0.5 * first["reward/format_reward_func/mean"] + first["reward/accuracy/mean"]
    assert first["reward/mean"] == pytest.approx(total)
    assert asked[0] == dataset[0]["prompt"] or asked[0] in [row["prompt"] for row in dataset]


def test_several_kinds_of_tasks_with_rewards_that_do_not_apply(tiny_model_folder: Path) -> None:
    """A column called `task` chooses the reward; None means that a reward does not apply. One is async."""
    dataset = Dataset({"prompt": [f"{i}?" for i in range(4)], "task": ["math", "coding"] * 2})

    def math_reward_func(prompts: Any, completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        return [float(len(c)) if t == "math" else None for c, t in zip(completions, task, strict=True)]

    async def coding_reward_func(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [float("a" in c) if t == "coding" else None for c, t in zip(completions, task, strict=True)]

    trainer = GRPOTrainer(
        model=str(tiny_model_folder),
        reward_funcs=[math_reward_func, coding_reward_func],
        args=GRPOConfig("kinds", per_device_train_batch_size=16, num_generations=4, max_steps=1, **SMALL),
        train_dataset=dataset,
    )
    trainer.train()
    (step,) = metrics_of(trainer)
    assert step["episodes/failed"] == 0
    assert step["reward/math_reward_func/mean"] > 1  # of the half that it applies to


def test_gspo_with_a_loaded_model_and_evaluation(tiny_model_folder: Path) -> None:
    """The sequence-level loss, several optimiser steps from one generation, and a model that is loaded already."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
    dataset = [{"prompt": [{"role": "user", "content": f"word {i}"}]} for i in range(4)]

    def vowels(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in c[0]["content"])) for c in completions]

    training_args = GRPOConfig(
        output_dir="gspo",
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=3e-4,
        epsilon_high=4e-4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        num_generations=4,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        **SMALL,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[vowels],
        args=training_args,
        train_dataset=dataset,
        eval_dataset=dataset[:2],
    )
    untrained = trainer.evaluate()
    trainer.train()
    assert trainer.state.global_step == 8  # two generations of four optimiser steps
    assert [step for step, _ in trainer.run.evaluations] == [1, 2]  # type: ignore[union-attr]
    trained = trainer.evaluate()
    assert trained["eval_reward"] == trained["eval_rewards/vowels/mean"]
    assert trained["eval_reward"] == pytest.approx(trainer.run.evaluations[-1][1]["eval/sampled/vowels"])  # type: ignore[union-attr]
    assert set(untrained) == set(trained)
    episode = (trainer.run.path / "episodes.jsonl").read_text().splitlines()[0]  # type: ignore[union-attr]
    assert "im_start" not in episode
    trainer.save_model("saved")
    assert AutoTokenizer.from_pretrained("saved").chat_template == tokenizer.chat_template
    changed = AutoModelForCausalLM.from_pretrained("saved").state_dict()
    assert any(not weight.equal(changed[name]) for name, weight in model.state_dict().items())


def test_adapters_and_a_lambda(tiny_model_folder: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = GRPOTrainer(
        str(tiny_model_folder),
        reward_funcs=[lambda completions: [float(len(c)) for c in completions]],
        args=GRPOConfig("adapters", num_generations=8, num_train_epochs=1, **SMALL),
        train_dataset=[{"prompt": "a"}, {"prompt": "b"}],
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    assert trainer.train().global_step == 2  # one prompt at a time
    trainer.save_model("adapter")
    written = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], sorted(written["target_modules"])) == (4, 8, ["q_proj", "v_proj"])
