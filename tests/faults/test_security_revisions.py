"""A model of the hub is read at one commit, the run says which, and goes on with it when the hub has moved on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.app.run_files import at_original_revision
from covey.cli.main import main
from covey.config.schema import Config, LoraConfig, ModelConfig
from covey.errors import Absent, InputError
from covey.models.loading import load_policy, locate, open_source
from covey.rewards.reward_model import RewardModel
from covey.training.folder import open_folder
from tests.conftest import byte_tokenizer, tiny_llama

OLD, NEW = "1" * 40, "2" * 40
SMALL = ["data.val_size=2", "data.train_batch_size=2", "rollout.group_size=2", "rollout.max_tokens=4"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two commits of one model; `main` is the newer, `v1` the older. Nothing else is reachable."""
    home = tmp_path / "hub" / "models--someone--tiny"
    tokenizer = byte_tokenizer()
    for seed, commit in enumerate((OLD, NEW)):
        folder = home / "snapshots" / commit
        tiny_llama(vocabulary=len(tokenizer), seed=seed, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(NEW)
    (home / "refs" / "v1").write_text(OLD)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home.parent))
    for module in ("transformers.utils.hub", "huggingface_hub.file_download"):
        for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(home.parent), raising=False)
    monkeypatch.chdir(tmp_path)
    return home


def weight(model: Any) -> float:
    return float(model.get_input_embeddings().weight.detach()[3, 3])


def at(name: str, **more: Any) -> ModelConfig:
    return ModelConfig(name=name, device="cpu", **more)


@pytest.mark.parametrize(
    ("name", "commit"), [("", NEW), ("@main", NEW), ("@v1", OLD), (f"@{OLD}", OLD), (f"@{NEW}", NEW)]
)
def test_a_name_may_say_which(hub: Path, name: str, commit: str) -> None:
    source = open_source(at(f"someone/tiny{name}"))
    assert (source.path, source.revision) == ("someone/tiny", commit)
    there = tiny_llama(vocabulary=len(byte_tokenizer()), seed=int(commit == NEW))
    assert weight(load_policy(source, at(source.name))) == pytest.approx(weight(there))


def test_weights_are_of_the_commit_that_was_seen_first(hub: Path) -> None:
    """Somebody pushes between the two readings."""
    (hub / "refs" / "main").write_text(OLD)
    source = open_source(at("someone/tiny"))
    (hub / "refs" / "main").write_text(NEW)
    shutil.rmtree(hub / "snapshots" / NEW)
    load_policy(source, at("someone/tiny"))
    assert source.revision == OLD and source.eos_ids()


def test_a_revision_that_is_not_there_is_told(hub: Path) -> None:
    with pytest.raises(Absent, match="cannot load model  someone/tiny@v9"):
        open_source(at("someone/tiny@v9"))
    with pytest.raises(InputError, match="unknown model"):
        locate("tiny@v1")


def test_a_run_goes_on_with_the_commit_it_began_with(hub: Path) -> None:
    (hub / "refs" / "main").write_text(OLD)
    words = ["train", "model=someone/tiny", *SMALL, "loop.total_steps=2", "loop.save_every=1"]
    assert main([*words, "loop.max_minutes=0", "--unfinished", "7"]) == 7
    (run,) = Path("outputs").glob("*/*")
    assert json.loads((run / "run.json").read_text())["model_revision"] == OLD
    (hub / "refs" / "main").write_text(NEW)
    config = Config(model=at("someone/tiny"))
    newer = open_source(config.model)
    folder = open_folder(run)
    began = at_original_revision(newer, config, folder)
    folder.release()
    assert newer.revision == NEW and began is not None and began.revision == OLD
    assert began.tokenizer.chat_template is not None
    assert main(words) == 0
    assert list(Path("outputs").glob("*/*")) == [run], "it went on in its folder"
    assert json.loads((run / "run.json").read_text())["model_revision"] == OLD


def test_an_adapter_knows_the_commit_below_it(hub: Path, tmp_path: Path) -> None:
    config = at("someone/tiny@v1", lora=LoraConfig(rank=2))
    load_policy(open_source(config), config).save_pretrained(tmp_path / "adapter")
    assert locate(str(tmp_path / "adapter")) == ("someone/tiny", tmp_path / "adapter", OLD)
    again = open_source(at(str(tmp_path / "adapter")))
    assert again.revision == OLD


def test_a_reward_model_may_say_which_too(hub: Path) -> None:
    with pytest.raises(InputError, match="is not a sequence classifier"):
        RewardModel(model="someone/tiny@v1").verify()
    with pytest.raises(Absent):
        RewardModel(model="someone/tiny@v9").verify()
