"""Broken model folders: every command refuses them before it starts anything, with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from covey.cli.main import main
from covey.config.schema import ModelConfig
from covey.models.loading import load_policy, open_source
from tests.conftest import byte_tokenizer, tiny_llama
from tests.faults.broken_models import (
    DAMAGES,
    OF_PROMPTS,
    SOME,
    WEIGHTS,
    Damage,
    added_tokens,
    config,
    tensors,
    text,
    with_also,
    without,
)

TASKS = ["data=arithmetic", "data.train_size=8", "data.val_size=2", "rollout.max_tokens=8"]
PPO = ["algorithm=ppo", "model.device=cpu", *TASKS]
# MODEL is the broken folder, WHOLE one that is not.
COMMANDS: dict[str, list[str]] = {
    "validate": ["train", "--validate-only", "model=MODEL", *TASKS],
    "train": ["train", "model=MODEL", "loop.total_steps=1", *TASKS],
    "multirun": ["train", "--multirun", "model=MODEL", "learner.lr=1e-5,2e-5", *TASKS],
    "critic": ["train", "model=WHOLE", "critic.model=MODEL", *PPO],
    "sft": ["sft", "model=MODEL", "data.train_files=demos.jsonl"],
    "eval": ["eval", "MODEL", *TASKS],
    "sample": ["sample", "MODEL", *TASKS],
    "serve": ["serve", "MODEL"],
    "export": ["export", "MODEL", "new/out"],
}


@pytest.fixture
def model(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, in a folder with nothing else but demonstrations."""
    monkeypatch.chdir(tmp_path)
    Path("demos.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def refused(words: Sequence[str], fragments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A user's mistake: its exit code and message, no traceback, and no files left behind."""
    before = sorted(Path().rglob("*"))
    assert main(list(words)) == 2, words
    output = capsys.readouterr().err
    for part in (*fragments, "nothing was started"):
        assert part in output, words
    assert "Traceback" not in output and "LOAD REPORT" not in output
    assert sorted(Path().rglob("*")) == before, f"{words} left something behind"


def command(name: str, whole: Path) -> list[str]:
    return [word.replace("MODEL", "model").replace("WHOLE", str(whole)) for word in COMMANDS[name]]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_folder_is_not_trained(
    damage: str, model: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injure, fragments = DAMAGES[damage]
    injure(model)
    for name in ("validate", "train"):
        refused(command(name, tiny_model_folder), fragments, capsys)


@pytest.mark.parametrize("damage", SOME)
def test_every_command_refuses_a_broken_folder(
    damage: str, model: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injure, fragments = DAMAGES[damage]
    injure(model)
    for name in COMMANDS:
        refused(command(name, tiny_model_folder), fragments, capsys)


@pytest.mark.parametrize("damage", OF_PROMPTS)
@pytest.mark.parametrize("name", ["validate", "train", "sft", "eval", "sample"])
def test_damage_that_shows_in_prompts(
    name: str, damage: str, model: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injure, fragments = OF_PROMPTS[damage]
    injure(model)
    refused(command(name, tiny_model_folder), fragments, capsys)


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier") / "model"
    settings = tiny_llama(len(byte_tokenizer())).config
    settings.num_labels = 1
    LlamaForSequenceClassification(settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", SOME)
def test_a_broken_reward_model(
    damage: str, classifier: Path, tiny_model_folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injure, fragments = DAMAGES[damage]
    shutil.rmtree(model)
    shutil.copytree(classifier, model)
    tensors(lambda found: found | {"lm_head.weight": torch.zeros(87, 32)})(model)  # harmless
    injure(model)
    fragments = [part.replace("ForCausalLM", "ForSequenceClassification") for part in fragments]
    words = ["train", f"model={tiny_model_folder}", "reward=reward_model", "reward.options.reward_model.model=model"]
    refused([*words, *TASKS], fragments, capsys)


# -- adapters ----------------------------------------------------------------------------------------------------------

ADAPTER = "adapter_model.safetensors"


def adapter_tensors(change: Any) -> Damage:
    return lambda folder: save_file(change(load_file(folder / ADAPTER)), folder / ADAPTER)


def adapter_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ADAPTERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a tensor missing": (
        adapter_tensors(lambda found: {name: tensor for name, tensor in found.items() if name != FIRST}),
        ("the adapter does not fit its model and adapter_config.json", f"missing from its weights: {FIRST}"),
    ),
    "another rank": (adapter_config(r=3), ("of another shape in its weights", "lora_A.weight [2, 32], not [3, 32]")),
    "other modules": (adapter_config(target_modules=["k_proj"]), ("missing from its weights", "k_proj", "not in the")),
    "modules that are not there": (adapter_config(target_modules=["c_attn"]), ("no adapter for a llama model",)),
    "no kind that peft knows": (adapter_config(peft_type="LORRA"), ("no adapter for a llama model",)),
    "weights cut": (lambda f: (f / ADAPTER).write_bytes(b"123"), (f"{ADAPTER} is damaged: 3 bytes",)),
    "no weights": (lambda f: (f / ADAPTER).unlink(), (f"has no weights: {ADAPTER} is missing",)),
    "no base": (adapter_config(base_model_name_or_path=None), ("does not name its base model",)),
    "a base that is not here": (adapter_config(base_model_name_or_path="gone"), ("unknown model  gone",)),
    "no JSON": (text("adapter_config.json", "{"), ("does not name its base model", "Expecting")),
}


@pytest.fixture
def adapter(model: Path) -> Path:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    whole = ModelConfig(name=str(model), device="cpu")
    peft.get_peft_model(load_policy(open_source(whole), whole), lora).save_pretrained("adapter")
    return Path("adapter")


@pytest.mark.parametrize("damage", ADAPTERS)
def test_a_broken_adapter(damage: str, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    injure, fragments = ADAPTERS[damage]
    injure(adapter)
    refused(["train", "model=adapter", "algorithm=rloo", *TASKS], fragments, capsys)
    refused(["export", "adapter", "out"], fragments, capsys)


def test_an_intact_adapter_is_accepted(adapter: Path) -> None:
    assert main(["train", "--validate-only", "model=adapter", "algorithm=rloo", *TASKS]) == 0


# -- folders that are whole, though they look unusual ------------------------------------------------------------------


def tied(folder: Path) -> None:
    config(tie_word_embeddings=True)(folder)
    without("lm_head")(folder)


def in_two_files(folder: Path) -> None:
    names = sorted(load_file(folder / WEIGHTS))
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-0000{1 + (at > 9)}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: found[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight")
UNUSUAL: dict[str, Damage] = {
    "a head tied to the embedding": tied,
    "frequencies of older versions": with_also(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)),
    "a value head beside it": with_also(v_head__summary__weight=torch.ones(1, 32)),
    "a classifier's head beside it": with_also(score__weight=torch.ones(1, 32)),
    "a part for pictures": with_also(vision_tower__layers__0__weight=torch.ones(2, 2)),
    "a layer that predicts further tokens": lambda folder: (
        config(num_nextn_predict_layers=1)(folder),
        with_also(model__layers__2__eh_proj__weight=torch.ones(2, 2))(folder),
    ),
    "half precision": tensors(lambda found: {name: tensor.bfloat16() for name, tensor in found.items()}),
    "several files": in_two_files,
    "more rows than tokens": lambda folder: (
        config(vocab_size=96)(folder),
        tensors(lambda f: f | {n: torch.zeros(96, 32) for n in ("lm_head.weight", "model.embed_tokens.weight")})(
            folder
        ),
    ),
    "a special token that no prompt has": added_tokens("<image>", special=True),
    "no generation_config.json": lambda folder: (folder / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_unusual_but_intact_folders(unusual: str, model: Path) -> None:
    UNUSUAL[unusual](model)
    assert main(["train", "--validate-only", "model=model", *TASKS]) == 0
    whole = ModelConfig(name="model", device="cpu")
    assert load_policy(open_source(whole), whole).num_parameters() > 0


def test_a_critic_may_start_from_a_classifier(classifier: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """A classifier has no LM head, which the policy needs and the critic does not."""
    words = [f"critic.model={classifier}", *PPO, "loop.total_steps=1", "data.train_batch_size=2", "eval.after=false"]
    small = ["rollout.group_size=2", "eval.before=false", "logging.to=[]", f"logging.output_dir={tmp_path}"]
    assert main(["train", f"model={tiny_model_folder}", *words, *small]) == 0
    assert main(["train", "--validate-only", f"model={classifier}", *TASKS]) == 2


# -- what only loading shows -------------------------------------------------------------------------------------------


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one model, outside the working folder: its weights are not checked beforehand."""
    home = tmp_path / "hub" / "models--someone--tiny"
    folder = Path(shutil.copytree(model, home / "snapshots" / ("1" * 40)))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for module in ("huggingface_hub.constants", "transformers.utils.hub", "huggingface_hub.file_download"):
        for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(home.parent), raising=False)
    return folder


@pytest.mark.parametrize(
    ("injure", "fragments"),
    [
        (without("model.norm"), ("someone/tiny: its weights do not fit", "model.norm.weight")),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), ("the weights of someone/tiny are damaged",)),
        (config(hidden_act="sillu"), ("the configuration of someone/tiny: a llama model cannot be built from it",)),
    ],
)
@pytest.mark.parametrize("name", ["train", "sft", "eval", "sample"])
def test_a_model_of_the_hub_is_refused_while_it_loads(
    name: str, injure: Damage, fragments: Sequence[str], hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injure(hub)
    words = [word.replace("MODEL", "someone/tiny") for word in COMMANDS[name]]
    refused(words, fragments, capsys)


def test_an_existing_folder_stays(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without("model.norm")(hub)
    Path("outputs/eval").mkdir(parents=True)
    refused(["train", "model=someone/tiny", *TASKS], ["its weights do not fit"], capsys)
    refused(["eval", "someone/tiny", *TASKS], ["its weights do not fit"], capsys)
    assert Path("outputs/eval").is_dir()
