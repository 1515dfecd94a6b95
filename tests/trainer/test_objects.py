"""Everything may be an object: models, tokenizers, data, tools, agents, algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import covey
from covey.algorithms import ALGORITHMS, settings
from covey.algorithms.named import class_name, stub
from covey.errors import InputError
from tests.conftest import byte_tokenizer, tiny_llama
from tests.trainer.conftest import ROWS, SMALL, vowels


def test_a_loaded_model_is_trained_as_a_copy() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    starts = []
    for _ in range(2):
        with covey.Trainer(model, ROWS, vowels, tokenizer=tokenizer, **SMALL) as trainer:
            starts.append(trainer.config.model.name)
            list(trainer)
            trained = trainer.model.state_dict()
    assert starts[0] == starts[1] and Path(starts[0]).is_dir()  # the same model is kept once
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert any(not torch.equal(weight, before[name]) for name, weight in trained.items())


def test_the_tokenizer_of_a_loaded_model_is_found_by_its_name(tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    trainer = covey.Trainer(model, ROWS, vowels, **SMALL)
    assert trainer.config.model.name.startswith("outputs/start_models/model-")
    model.config._name_or_path = "nowhere/at-all"
    with pytest.raises(InputError, match="pass it: tokenizer="):
        covey.Trainer(model, ROWS, vowels, **SMALL)
    with pytest.raises(InputError, match="must be a name, a folder or a transformers model, got int"):
        covey.Trainer(3, ROWS, vowels, **SMALL)  # type: ignore[arg-type]


def test_a_tokenizer_with_another_template(tiny_model_folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m['content'] }}{% endfor %}"
    with covey.Trainer(str(tiny_model_folder), ROWS, vowels, tokenizer=tokenizer, **SMALL) as trainer:
        step = trainer.step()
        assert step is not None
        assert trainer.tokenizer.decode(step.episodes[0].turns[0].prompt_ids).startswith("Q: say ")
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(InputError, match="another vocabulary"):
        covey.Trainer(str(tiny_model_folder), ROWS, vowels, tokenizer=tokenizer, **SMALL)


class Dataset:
    """What Trainer uses of a Hugging Face Dataset: it yields dicts, and is neither a list nor a Sequence."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_rows_of_any_kind(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    verl = {"prompt": [{"role": "user", "content": "hm"}], "reward_model": {"ground_truth": "a"}}
    kinds: list[Any] = [Dataset(ROWS), (row for row in ROWS), tuple(ROWS), [verl]]
    found = [
        covey.Trainer(model, rows, vowels, validation=Dataset(ROWS[:1]), **SMALL)._prepared.tasks for rows in kinds
    ]
    assert [len(tasks.train) for tasks in found] == [4, 4, 4, 1]
    assert all(len(tasks.validation) == 1 for tasks in found)
    assert found[0].train == found[1].train == found[2].train
    assert found[3].train[0].answer == "a"
    for wrong, message in [
        ({"train": ROWS}, r"several data sets \(train\)"),
        ([1], "row 1: must be a dict"),
        ([{"question": "a", "data_id": 1}, {"question": "b", "data_id": 1}], "two of tasks have the id '1'"),
        ([{"messages": [{"role": "usr", "content": "a"}]}], "unknown role 'usr'"),
    ]:
        with pytest.raises(InputError, match=message):
            covey.Trainer(model, wrong, vowels, **SMALL)  # type: ignore[arg-type]


class Pandas:
    """What Trainer uses of a pandas table: a Parquet file's lists are NumPy arrays in it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def iterrows(self) -> Any: ...

    def to_dict(self, form: str) -> Any:
        assert form == "records"
        return self.rows


def test_arrays_in_a_pandas_table_are_lists(tiny_model_folder: Path) -> None:
    row = {"prompt": np.array([{"role": "user", "content": "hm"}]), "answer": "a", "data_id": np.int64(7)}
    nested = {"truth": {"values": np.array([1, 2])}}
    model = str(tiny_model_folder)
    (task,) = covey.Trainer(model, Pandas([row | nested]), vowels, **SMALL)._prepared.tasks.train  # type: ignore[arg-type]
    assert task.messages == ({"role": "user", "content": "hm"},) and task.id == "7"
    assert task.columns == {"truth": {"values": [1, 2]}}


def test_sizes_of_rows(tiny_model_folder: Path) -> None:
    sizes = {"data.train_size": 3, "data.val_size": 1}
    tasks = covey.Trainer(str(tiny_model_folder), ROWS, vowels, validation=ROWS, **SMALL | sizes)._prepared.tasks
    assert (len(tasks.train), len(tasks.validation)) == (3, 1)
    with pytest.raises(InputError, match=r"data.val_files has no effect: tasks= has rows\n  fix: validation=FILE"):
        covey.Trainer(str(tiny_model_folder), ROWS, vowels, **SMALL | {"data.val_files": "a.jsonl"})
    with pytest.raises(InputError, match="validation= has rows, but tasks= is the name 'sort'"):
        covey.Trainer(str(tiny_model_folder), "sort", vowels, validation=ROWS, **SMALL)


def shout(text: str) -> str:
    """Write a text in capitals.

    Args:
        text: What to write.
    """
    return text.upper()


async def twice(policy: Any, task: covey.Task) -> str:
    await policy.chat(task.messages)
    return str(await policy.chat(task.messages))


class Guess:
    """An environment that ends with the first reply."""

    def reset(self, task: covey.Task) -> None: ...

    def step(self, reply: str) -> covey.Done:
        return covey.Done(reward=float(len(reply)))


def test_tools_and_agents(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    with covey.Trainer(
        model, ROWS, vowels, tools=[shout, "calculator"], **SMALL, **{"model.context_length": 2048}
    ) as trainer:
        assert trainer.config.agent.name == "hf"
        step = trainer.step()
        assert step is not None
        prompt = trainer.tokenizer.decode(step.episodes[0].turns[0].prompt_ids)
        assert "Write a text in capitals." in prompt and "calculator" in prompt
        written = yaml.safe_load((trainer.path / "config.yaml").read_text())
    assert written["agent"]["tools"] == [f"{__file__}:shout", "calculator"]
    for agent in (twice, covey.agent(twice)):
        with covey.Trainer(model, ROWS, vowels, agent=agent, **SMALL) as trainer:
            step = trainer.step()
            assert step is not None and all(len(episode.turns) == 2 for episode in step.episodes)
            assert trainer.config.agent.name == f"{__file__}:twice"
    ends = {
        "rollout": {"group_size": 4, "max_tokens": 200, "stop": [*"abcdefghijklmnop"]}
    }  # cut off, it gets no reward
    with covey.Trainer(model, ROWS, agent=Guess, **(SMALL | ends)) as trainer:
        step = trainer.step()
        assert step is not None and step.metrics["reward/mean"] > 0
    with pytest.raises(InputError, match="tools= are for the built-in agents"):
        covey.Trainer(model, ROWS, vowels, agent=twice, tools=[shout], **SMALL)
    assert covey.Trainer(model, ROWS, vowels, agent={"max_seconds": 5}, **SMALL).config.agent.max_seconds == 5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_as_a_class_has_its_settings(name: str) -> None:
    cls = getattr(covey, class_name(name))
    assert cls.__doc__ and repr(cls()) == f"{class_name(name)}()" and cls().changed() == {}
    for key, (_, default) in settings(name).items():
        assert getattr(cls(), key) == default


def test_an_algorithm_is_given_as_an_object(tiny_model_folder: Path) -> None:
    given = covey.DrGrpo(clip_high=0.3, kl_coef=0.1)
    assert repr(given) == "DrGrpo(clip_high=0.3, kl_coef=0.1)"
    config = covey.Trainer(str(tiny_model_folder), ROWS, vowels, given, **SMALL).config.algorithm
    assert (config.name, config.clip_high, config.kl_coef, config.std_normalize) == ("dr_grpo", 0.3, 0.1, False)
    assert covey.Trainer(str(tiny_model_folder), ROWS, vowels, covey.Rloo, **SMALL).config.algorithm.name == "rloo"
    with pytest.raises(TypeError, match="bta"):
        covey.Gvpo(bta=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"algorithm\.beta must be"):
        covey.Trainer(str(tiny_model_folder), ROWS, vowels, covey.Gvpo(beta=-1.0), **SMALL)


def test_what_type_checkers_see_of_them_is_what_is_made() -> None:
    """named.pyi: python -m covey.algorithms.named > src/covey/algorithms/named.pyi"""
    import covey.algorithms.named as named

    assert Path(named.__file__).with_suffix(".pyi").read_text() == stub()


def test_a_recipe_is_where_settings_start(tiny_model_folder: Path) -> None:
    trainer = covey.Trainer(str(tiny_model_folder), recipe="demo", **{"loop.total_steps": 7})
    assert trainer.config.data.name == "largest" and trainer.config.rollout.group_size == 16
    assert trainer.config.loop.total_steps == 7


def test_other_code_of_an_agent_is_another_run(tiny_model_folder: Path) -> None:
    async def agent(policy: Any, task: covey.Task) -> str:
        return str(await policy.chat(task.messages))

    def fingerprint(given: Any) -> str:
        return covey.Trainer(str(tiny_model_folder), ROWS, vowels, agent=given, **SMALL)._prepared.fingerprint

    first = agent

    async def agent(policy: Any, task: covey.Task) -> str:  # type: ignore[no-redef]
        return str(await policy.chat(task.messages)) + "!"

    assert fingerprint(first) == fingerprint(first) != fingerprint(agent)


def test_the_reward_of_an_edited_file_is_read_again(tiny_model_folder: Path) -> None:
    """Also where the new text is as long and as old as the one before."""
    means = []
    for value in (1, 2):
        Path("mine.py").write_text(f"def score(final_answer):\n    return {value}.0\n")
        run = covey.train(str(tiny_model_folder), ROWS, "mine.py:score", **(SMALL | {"loop.total_steps": 1}))
        means.append(json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]["reward/mean"])
    assert means == [1.0, 2.0]
