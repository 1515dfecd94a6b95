"""A folder in which the commands of the pages work: the files they name, and a tiny random model under every model's
name. Nothing is fetched."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.app import compose as words
from covey.cli.main import main
from covey.config import compose
from tests.docs.pages import PYTHON
from tests.rollout.no_vllm import without_vllm

QUESTIONS = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(16)]
HELD_OUT = [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(2)]
PROGRAMS = [
    {
        "question": f"Write f{i}, which adds {i}.",
        "answer": "",
        "test_list": [f"assert f{i}(1) == {1 + i}"],
        "test_setup_code": "",
    }
    for i in range(16)
]
PASSAGES = [{"title": "Covey", "text": "A covey is a small group of quails."}, {"title": "Oslo", "text": "A city."}]
DEMONSTRATIONS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": str(i)}]} for i in range(8)
]
GRADE_SCHOOL = [{"question": f"Ann has {i} nuts and finds 2.", "answer": f"{i} + 2\n#### {i + 2}"} for i in range(256)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "train.jsonl": QUESTIONS,
    "tasks.jsonl": QUESTIONS,
    "levels.jsonl": [row | {"level": ["easy", "medium", "hard"][i % 3]} for i, row in enumerate(QUESTIONS)],
    "test.jsonl": HELD_OUT,
    "demos.jsonl": DEMONSTRATIONS,
    "held_out.jsonl": DEMONSTRATIONS[:2],
    "docs.jsonl": PASSAGES,
    "mbpp.jsonl": PROGRAMS,
    "raw/gsm8k/train.jsonl": GRADE_SCHOOL,
    "raw/gsm8k/test.jsonl": [{"question": f"Bob eats {i} figs.", "answer": f"#### {i}"} for i in range(2)],
}
MEASURED = {  # as benchmarks/decode.py writes it
    "name": "decode",
    "device": "NVIDIA H200",
    "settings": {},
    "rows": [
        {"model": model, "side": "covey", "batch": batch, "decode_tokens_per_s": 100.0 * batch}
        for model in ("qwen2.5-0.5b", "qwen2.5-1.5b")  # its default ones
        for batch in (1, 8, 64)
    ],
}
WHOLE: dict[str, Any] = {  # JSON files that hold one value
    "benchmarks/results/decode-nvidia-h200.json": MEASURED,
    "data/rlhf/math/gsm8k_train.json": QUESTIONS,
    "data/rlhf/math/gsm8k_test.json": HELD_OUT,
    "data/rlhf/qa/train_random_8000.json": QUESTIONS,
    "data/rlhf/code/train.json": PROGRAMS,
}
AGENT = """
import json, os, urllib.request

def post(address, body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))

asked = {"model": "any", "messages": json.loads(os.environ["COVEY_TASK"])["messages"]}
reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)["choices"][0]["message"]["content"]
post(os.environ["COVEY_EPISODE_URL"] + "/reward", {"reward": len(reply) / 100})
"""
TEXTS = {
    "my_rewards.py": "def exact(final_answer, answer):\n    return float(final_answer.strip() == answer)\n\n"
    "def short(final_answer, limit=20):\n    return max(0.0, 1 - len(final_answer) / limit)\n",
    "my.py": "def short(final_answer):\n    return max(0.0, 1 - len(final_answer) / 20)\n",
    "my_tools.py": "".join(
        f'def {name}(text: str) -> str:\n    """Look a text up.\n\n    Args:\n        text: What.\n    """\n'
        "    return text[::-1]\n\n"
        for name in ("lookup", "search", "weather")
    ),
    "my_agent.py": AGENT,
    "my_config.yaml": "env:\n  N_GPUS: 1\npython_args:\n  algorithm.gvpo_beta: 0.1\n",
}
RUN = ["data=arithmetic", "data.val_size=2", "data.train_batch_size=2", "rollout.group_size=4", "rollout.max_tokens=6"]
RUN += ["loop.total_steps=2", "loop.save_every=1", "learner.lr=1e-3", "resume=disable", "logging.tags=[baseline]"]
RUNS = ("outputs/DATE/TIME", "outputs/A", "outputs/B", "outputs/2026-07-01/10-00-00")
CHECKPOINTS = ("step-000120",)  # that pages name, besides those of the run
MODEL_KEYS = ("model", "model.name", "agent.model_name_or_path")
CLASSIFIER = "reward.options.reward_model.model"


def furnish(folder: Path, model: Path) -> None:
    """All files that pages name. Made once, in a folder that is then copied."""
    for name, rows in ROWS.items():
        _write(folder / name, "\n".join(map(json.dumps, rows)) + "\n")
    for name, value in WHOLE.items():
        _write(folder / name, json.dumps(value))
    for name, text in TEXTS.items():
        _write(folder / name, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in PYTHON:  # "Save this as digits.py"
            if block.page.name == "tutorial.md" and (named := re.match(r"# (\w+\.py)\n", block.text)):
                _write(folder / named[1], block.text)
                runpy.run_path(named[1], run_name="__main__")
        patch.setenv("DATA_DIR", str(folder / "data"))
        assert main(["data", "prepare", "gsm8k", "--from", str(folder / "raw/gsm8k")]) == 0
    (first, *others) = RUNS
    assert main(["train", f"model={model}", *RUN, f"logging.output_dir={folder / 'made'}"]) == 0
    (made,) = (folder / "made").glob("*/*")
    (folder / first).parent.mkdir(parents=True)
    made.rename(folder / first)
    for name in CHECKPOINTS:
        shutil.copytree(folder / first / "checkpoints/step-000002", folder / first / "checkpoints" / name)
    for name in others:
        shutil.copytree(folder / first, folder / name)
    shutil.rmtree(folder / "made")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def enter(furnished: Path, folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a copy of the furnished folder from now on."""
    import huggingface_hub.constants

    from covey.models import loading

    shutil.copytree(furnished, folder, dirs_exist_ok=True)
    patch.chdir(folder)
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr(words, "algorithm_schemas", _schemas)
    patch.setattr(words, "export", lambda variables: None)
    patch.setattr(loading, "builtin_folder", lambda name: model)
    patch.setattr("covey.tasks.load.GENERATED_TRAIN", 128)
    patch.setattr("covey.tasks.load.GENERATED_VALIDATION", 4)
    without_vllm(patch)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "CKPT_DIR", "VERBOSITY", "RAY_ADDRESS"):
        patch.delenv(name, raising=False)
    patch.setenv("DATA_DIR", str(folder / "data"))
    patch.setenv("SERPER_API_KEY", "none, and never asked: so small a model calls no tool")


_schemas = functools.cache(words.algorithm_schemas)


def fill_batches(given: list[str]) -> None:
    """More rows where a line's batches are larger: it would be warned of that."""
    size = max((int(n) for n in re.findall(r"data\.train_batch_size=(\d+)", " ".join(given))), default=0)
    if size > len(QUESTIONS):
        rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(size)]
        for name in ("train.jsonl", "data/rlhf/math/gsm8k_train.json"):
            Path(name).write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows))


def put_models(given: list[str], model: Path) -> None:
    """The tiny model under every name of a model that a command line or its recipe has: a folder ORG/NAME here."""
    names = [word.partition("=")[2] for word in given if word.partition("=")[0] in MODEL_KEYS]
    if "--config-name" in given:
        recipe = given[given.index("--config-name") + 1]
        names.append(compose([], algorithms=_schemas(), config_name=recipe, tolerant=True).config.model.name)
    for name in names:
        place = Path(name)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not place.exists():
            place.parent.mkdir(exist_ok=True)
            os.symlink(model, place, target_is_directory=True)
    for word in given:
        if word.startswith(f"{CLASSIFIER}="):
            _put_classifier(Path(word.partition("=")[2]), model)


def _put_classifier(place: Path, model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    LlamaForSequenceClassification(AutoConfig.from_pretrained(model, num_labels=1)).save_pretrained(place)
    AutoTokenizer.from_pretrained(model).save_pretrained(place)
