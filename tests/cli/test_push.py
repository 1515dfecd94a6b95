"""covey push: what is written, what the card states, what reaches the hub, and how its refusals are explained."""

from __future__ import annotations

import base64
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError

import covey
from covey.app.model_card import hide_folders, hub_name, model_card, modelfile, not_for_gguf
from covey.cli.main import main
from covey.evaluation.statistics import wilson
from tests.cli.test_export import loaded, logits_of

HTTP: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])  # httpx or httpx2
SETTINGS = ["data=sort", "data.val_size=4", "data.train_batch_size=2", "rollout.group_size=2", "rollout.max_tokens=4"]
SETTINGS += [
    "loop.total_steps=2",
    "algorithm=grpo",
    "learner.lr=1e-3",
    "data.system_prompt=Sort it.",
    "loop.save_every=1",
]


@pytest.fixture(scope="module")
def run(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"), tiny_model_folder)


@pytest.fixture(scope="module")
def adapter_run(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"), tiny_model_folder, "model.lora.rank=2")


def trained(folder: Path, model: Path, *settings: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", f"model={model}", *SETTINGS, *settings]) == 0
    (path,) = folder.glob("outputs/*/*")
    return path


# -- The files ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_the_model_and_its_card(
    run: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)  # nothing is asked of the hub
    out = tmp_path / "out"
    assert main(["push", str(run / "checkpoints/step-000002"), "me/tiny-sorter", "--dry-run", str(out)]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {"README.md", "curve.png", "covey.yaml", "Modelfile", "config.json"}
    assert logits_of(loaded(out)).equal(logits_of(loaded(run / "checkpoints/step-000002/model")))
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers" and head["tags"] == ["covey", "reinforcement-learning", "grpo"]
    assert "base_model" not in head, "a folder is not a model of the hub"
    assert "# tiny-sorter\n\nmodel trained with **grpo** on sort" in card and "2 updates" in card
    assert "| `learner.lr` | `0.001` |" in card and '| `data.system_prompt` | `"Sort it."` |' in card
    assert "learner.beta1" not in card, "it has its default"
    assert "covey train --config covey.yaml" in card
    repeat = (out / "covey.yaml").read_text()
    assert "name: ./model\n" in repeat
    for path in {str(run), str(run.parents[2]), str(tiny_model_folder.parent), str(Path.home())}:
        assert path not in card and path not in repeat, "no folders of this machine"
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(tiny_model_folder)
    repeated = ["train", "--config", str(out / "covey.yaml"), "--validate-only"]
    assert main(repeated) == 0


def test_the_card_has_the_evaluation_of_these_weights(run: Path, tmp_path: Path) -> None:
    assert main(["push", str(run), "me/x", "--dry-run", str(tmp_path / "best")]) == 0
    assert main(["push", str(run / "checkpoints/step-1"), "me/x", "--dry-run", str(tmp_path / "first")]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {record["step"]: record["metrics"] for record in records if record["kind"] == "eval"}
    best = (tmp_path / "best/README.md").read_text()
    assert "timing/" not in best
    for key, value in evaluations[2].items():
        if not key.startswith("eval/"):
            continue
        row = re.search(rf"^\| `{key}` \| (.*) \| (.*) \| (.*) \|$", best, re.MULTILINE)
        assert row is not None and (row[1], row[2]) == (f"{evaluations[0][key]:.3f}", f"{value:.3f}"), key
        values = [metrics[key] for metrics in evaluations.values()]
        low, high = wilson(value, 4) if all(0 <= one <= 1 for one in values) else (None, None)
        assert row[3] == ("" if low is None else f"{low:.3f} to {high:.3f}"), key
    assert "4 held-out tasks." in best
    assert "These weights were not evaluated in the run." in (tmp_path / "first/README.md").read_text()


def test_an_adapter_goes_merged_or_alone(adapter_run: Path, tmp_path: Path) -> None:
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    assert main(["push", str(adapter_run), "me/x", "--dry-run", str(merged)]) == 0
    assert main(["push", str(adapter_run), "me/x", "--dry-run", str(alone), "--adapter"]) == 0
    assert (merged / "model.safetensors").is_file() and not (merged / "adapter_config.json").exists()
    assert (alone / "adapter_model.safetensors").is_file() and not (alone / "model.safetensors").exists()
    assert (merged / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    assert (alone / "Modelfile").read_text().startswith("FROM ./base.gguf\nADAPTER ./adapter.gguf\n")
    card = (alone / "README.md").read_text()
    assert "library_name: peft" in card and "convert_lora_to_gguf.py" in card and "PeftModel.from_pretrained" in card


def test_a_table_of_covey_eval_is_included(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = tmp_path / "20260131"
    evaluation.mkdir()
    words = ["push", str(run), "me/x", "--eval", str(evaluation), "--dry-run"]
    assert main([*words, str(tmp_path / "a")]) == 2
    assert "not a finished evaluation (no results.md)" in capsys.readouterr().err
    (evaluation / "results.md").write_text("| model | pass@1 |\n")
    assert main([*words, str(tmp_path / "b")]) == 0
    assert "### 20260131\n\n| model | pass@1 |\n" in (tmp_path / "b/README.md").read_text()


def test_the_modelfile_and_the_names_of_base_models(tmp_path: Path) -> None:
    config = {"rollout.max_tokens": 7, "rollout.stop": ['"'], "data.system_prompt": "Be brief."}
    assert modelfile(config, adapter=False) == (
        'FROM ./model.gguf\nPARAMETER num_predict 7\nPARAMETER stop "\\""\nSYSTEM """Be brief."""\n'
    )
    quoted = {"rollout.max_tokens": 7, "data.system_prompt": 'Write """docs""".\nFROM ./other.gguf\nEnd with """'}
    text = modelfile(quoted, adapter=False)
    assert text.count('"""') == 2 and text.index("FROM ./other") < text.rindex('"""')
    quoted["data.system_prompt"] = 'Say "yes"'
    assert modelfile(quoted, adapter=False).endswith('SYSTEM """Say "yes" """\n')
    assert hub_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_name("Qwen/Qwen3-4B@abc") == "Qwen/Qwen3-4B"
    assert hub_name("/home/someone/my-model") == "my-model"
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert "MambaForCausalLM is not among" in str(not_for_gguf(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert not_for_gguf(tmp_path) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/model", "./model"),
        ("~/runs/a/", "./a/"),
        ("../data/train.jsonl", "./train.jsonl"),
        ("python /home/me/agent.py --log=/tmp/log", "python agent.py --log=log"),
        ("mcp:stdio:python /srv/tools/server.py", "mcp:stdio:python server.py"),
        (["/srv/rewards.py:score"], ["./rewards.py:score"]),
        *((same, same) for same in ("Qwen/Qwen3-4B", "http://host:80/v1/chat", "data/train.jsonl", "/think", 3, None)),
    ],
)
def test_settings_are_shown_without_folders_of_this_machine(value: Any, shown: Any) -> None:
    tree = {"one": value, "data": {"system_prompt": "You are in /home/user/work", "stop": ["/a/b"]}}
    assert hide_folders(tree) == tree | {"one": shown}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    ("where", "tag", "loader"),
    [
        (None, "text-generation", "AutoModelForCausalLM"),
        ("folder", "image-text-to-text", "AutoModelForImageTextToText"),
        ("checkpoints/step-000002/model", "image-text-to-text", "AutoModelForImageTextToText"),
    ],
)
def test_a_model_that_sees_images_says_so(
    run: Path, tmp_path: Path, adapter: bool, where: str | None, tag: str, loader: str
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    (copied / "folder").mkdir()
    if adapter:
        (copied / "folder/adapter_config.json").write_text("{}")
    if where is not None:
        (copied / where / "preprocessor_config.json").write_text("{}")
    card = model_card(copied, 2, copied / "folder", "me/x")
    assert f"pipeline_tag: {tag}\n" in card
    assert (f"{loader}.from_pretrained(" if adapter else f"pipeline('{tag}', 'me/x')") in card


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL", "me/x"], "is not a run or one of its checkpoints"),
        (["outputs/nothing", "me/x"], "outputs/nothing is not here\n  fix: name a run's folder"),
        (["RUN"], "name a run or a checkpoint, and a repository"),
        (["RUN", "a b/c"], "a b/c: not the name of a repository"),
        (["RUN", "me/x", "--adapter", "--dry-run", "OUT"], "has no adapter"),
        (["RUN", "me/x", "--dtype", "int8", "--dry-run", "OUT"], "--dtype must be one of"),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    said: str,
    run: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"MODEL": str(tiny_model_folder), "RUN": str(run), "OUT": str(tmp_path / "out")}
    assert main(["push", *(places.get(word, word) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- The hub -----------------------------------------------------------------------------------------------------------


class Hub:
    """A hub at the HTTP boundary: keeps the files of one repository, or answers everything with `status`."""

    def __init__(self) -> None:
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.summary = ""
        self.tokens: set[str] = set()
        self.status = 200

    def __call__(self, request: Any) -> Any:
        self.tokens.add(request.headers.get("authorization", ""))
        path = request.url.path
        if self.status == 0:
            raise HTTP.ConnectError("Name or service not known")
        if self.status != 200:
            return HTTP.Response(self.status, json={"error": "said so"}, request=request)
        if path == "/api/repos/create":
            self.created = json.loads(request.content)
            owner, name = self.created.get("organization", "me"), self.created["name"]
            return HTTP.Response(200, json={"url": f"https://huggingface.co/{owner}/{name}"}, request=request)
        if path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files_of(request)]
            return HTTP.Response(200, json={"files": files}, request=request)
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in request.content.splitlines()]
            self.summary = lines[0]["value"]["summary"]
            self.files = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines[1:]}
            url = "https://huggingface.co/me/x/commit/abc"
            return HTTP.Response(200, json={"commitUrl": url, "commitOid": "abc"}, request=request)
        return HTTP.Response(200, json={}, request=request)


def files_of(request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(request.content)["files"]
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    transport = HTTP.MockTransport(fake)
    factory: Callable[[], Any] = lambda: HTTP.Client(transport=transport)  # noqa: E731
    huggingface_hub.set_client_factory(factory)
    yield fake
    from huggingface_hub.utils._http import default_client_factory

    huggingface_hub.set_client_factory(default_client_factory)


def test_a_run_reaches_the_hub_in_one_commit(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "me/x", "--private", "--message", "first"]) == 0
    assert capsys.readouterr().out.endswith("https://huggingface.co/me/x\n")
    assert (hub.created["name"], hub.created.get("visibility", hub.created.get("private"))) in (
        ("x", "private"),
        ("x", True),
    )
    assert hub.summary == "first" and "Bearer hf_secret" in hub.tokens
    assert {"README.md", "curve.png", "covey.yaml", "Modelfile", "model.safetensors", "tokenizer.json"} <= set(
        hub.files
    )
    assert hub.files["README.md"].decode().startswith("---\nlibrary_name: transformers\n")
    assert b"hf_secret" not in b"".join(hub.files.values())


def test_a_trainer_pushes_its_current_model(tiny_model_folder: Path, tmp_path: Path, hub: Hub) -> None:
    with covey.Trainer(
        model=str(tiny_model_folder),
        tasks="sort",
        algorithm="grpo",
        data={"train_batch_size": 2, "val_size": 2},
        rollout={"group_size": 2, "max_tokens": 4},
        loop={"total_steps": 3},
        logging={"output_dir": str(tmp_path), "to": []},
    ) as trainer:
        trainer.step()
        assert trainer.push_to_hub("me/x", commit_message="after one") == "https://huggingface.co/me/x"
        trainer.save_pretrained(tmp_path / "saved")
    assert hub.files["model.safetensors"] == (tmp_path / "saved/model.safetensors").read_bytes()
    assert "1 updates" in hub.files["README.md"].decode() and hub.summary == "after one"


@pytest.mark.parametrize(
    ("status", "why", "fix"),
    [
        (401, "the hub does not accept the token", "hf auth login, or HF_TOKEN="),
        (403, "the token may not write there (", "a token with write access to me/x"),
        (404, "the hub does not know it", "an organisation or user that exists"),
        (500, "the hub has an error", "wait, then the same command again"),
        (0, "the hub cannot be reached (Name or service not known)", "covey push ... --dry-run FOLDER here"),
    ],
)
def test_refusals_of_the_hub_are_shown_with_their_fix(
    status: int, why: str, fix: str, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own attempts
    hub.status = status
    assert main(["push", str(run), "me/x"]) == 2
    said = capsys.readouterr().err
    assert f"me/x was not uploaded: {why}" in said and f"  fix: {fix}" in said
