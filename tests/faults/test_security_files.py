"""Files from others: planted pickles are refused and never run, and so is Python code next to a model."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config.schema import LearnerConfig, LoraConfig, ModelConfig
from covey.errors import InputError
from covey.learner.learner import Learner
from covey.learner.saving import check_export, export
from covey.models.hub import no_pickles
from covey.models.loading import load_policy, locate, open_source
from covey.rewards.reward_model import RewardModel
from covey.tasks.reading import read_table
from covey.training.checkpoint import CheckpointStore
from tests.conftest import ROOT

RAN = "COVEY_TEST_PICKLE_RAN"


class Bomb:
    """Unpickling it sets an environment variable."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> dict[str, torch.Tensor]:
    os.environ[RAN] = "yes"
    return {}


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    os.environ.pop(RAN, None)
    yield
    ran = os.environ.pop(RAN, None)
    assert ran is None, "a planted pickle was run"


def plant(path: Path, *, zipped: bool = False) -> Path:
    if zipped:
        torch.save(Bomb(), path)
    else:
        path.write_bytes(pickle.dumps(Bomb()))
    return path


@pytest.fixture
def model(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def test_the_planted_pickle_would_run(tmp_path: Path) -> None:
    for zipped in (False, True):
        path = plant(tmp_path / "bomb", zipped=zipped)
        if zipped:
            torch.load(path, weights_only=False)
        else:
            pickle.loads(path.read_bytes())
        assert os.environ.pop(RAN) == "yes"


def refused(config: ModelConfig, what: str) -> None:
    """Refused before weights are read, and also while they are read if that check is disabled."""
    with pytest.raises(InputError, match=what) as output:
        open_source(config)
    assert "safetensors" in str(output.value)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_model_that_is_only_a_pickle(model: Path, name: str, zipped: bool) -> None:
    (model / "model.safetensors").unlink()
    plant(model / name, zipped=zipped)
    refused(ModelConfig(name=str(model)), rf"its weights are a pickle \({name}\), which is not loaded")
    with pytest.raises(InputError, match="pickle"):
        check_export(model, model.parent / "out", dtype=None, adapter=False)


def test_an_index_of_pickles(model: Path) -> None:
    (model / "model.safetensors").unlink()
    plant(model / "part.bin", zipped=True)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": "part.bin"}}))
    refused(ModelConfig(name=str(model)), r"should be in part\.bin")


def test_an_index_with_paths_out_of_the_folder(model: Path) -> None:
    shutil.move(model / "model.safetensors", model.parent / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(ModelConfig(name=str(model)), r"should be in \.\./other\.safetensors")


def test_a_configuration_that_names_a_pickle(model: Path) -> None:
    plant(model / "other.bin", zipped=True)
    change(model / "config.json", transformers_weights="other.bin")
    refused(ModelConfig(name=str(model)), r"should be in other\.bin")


@pytest.mark.parametrize("asked", [{"transformers_weights": "adapter_model.bin"}, {}])
def test_no_pickle_is_read_even_without_the_first_check(
    model: Path, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: a model of the hub is not checked before its files are downloaded."""
    config = ModelConfig(name=str(model), device="cpu")
    monkeypatch.setattr("covey.models.loading.check_weights_fit", lambda *_, **__: None)
    if not asked:
        (model / "model.safetensors").unlink()
    plant(model / ("adapter_model.bin" if asked else "pytorch_model.bin"), zipped=True)
    change(model / "config.json", **asked)
    with pytest.raises(InputError, match="pickle" if asked else r"no file named model\.safetensors"):
        load_policy(open_source(config), config)


def test_pickles_next_to_safetensors_are_ignored(model: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"):
        plant(model / name, zipped=name.endswith("pt"))
    config = ModelConfig(name=str(model), device="cpu")
    assert load_policy(open_source(config), config).num_parameters() > 0
    export(model, model.parent / "out")
    assert not [path.name for path in (model.parent / "out").iterdir() if path.suffix in (".pt", ".bin", ".pth")]


def test_an_adapter_that_is_a_pickle(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(name=str(tiny_model_folder), device="cpu", lora=LoraConfig(rank=2))
    load_policy(open_source(config), config).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    plant(tmp_path / "adapter_model.bin", zipped=True)
    with pytest.raises(InputError, match=r"pickle \(adapter_model\.bin\)"):
        open_source(ModelConfig(name=str(tmp_path)))
    with pytest.raises(InputError, match=r"pickle \(adapter_model\.bin\)"):
        check_export(tmp_path, tmp_path / "out", dtype=None, adapter=False)
    from peft import PeftModel

    base = load_policy(open_source(ModelConfig(name=str(tiny_model_folder), device="cpu")), config)
    with no_pickles("an adapter"), pytest.raises(InputError, match=r"adapter_model\.bin is a pickle"):
        PeftModel.from_pretrained(base.get_base_model(), tmp_path)
    assert torch.load.__module__.startswith("torch"), "and afterwards all is as it was"


def test_an_adapter_for_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(InputError, match="for itself"):
        locate(str(tmp_path))


def test_a_reward_model_that_is_a_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    plant(model / "pytorch_model.bin")
    change(model / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(InputError, match=r"pickle \(pytorch_model\.bin\)"):
        RewardModel(model=str(model)).verify()


# -- Python beside a model ---------------------------------------------------------------------------------------------

CODE = f"import os\nos.environ[{RAN!r}] = 'yes'\n"
CONFIG_CODE = CODE + "from transformers import LlamaConfig\nclass Theirs(LlamaConfig):\n    model_type = 'theirs'\n"


@pytest.fixture
def with_code(model: Path) -> Path:
    (model / "theirs.py").write_text(CONFIG_CODE)
    change(model / "config.json", model_type="theirs", auto_map={"AutoConfig": "theirs.Theirs"})
    return model


def test_code_of_the_model_is_not_run(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a question at the terminal: a run may have none."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    config = ModelConfig(name=str(with_code), device="cpu")
    with pytest.raises(InputError, match=r"model\.trust_remote_code=true"):
        open_source(config)
    from covey.app.simulation import model_shape
    from covey.config.schema import Config

    with pytest.raises(InputError):
        model_shape(Config(model=config))
    with pytest.raises(InputError):
        export(with_code, with_code.parent / "out")
    with pytest.raises(InputError):
        RewardModel(model=str(with_code)).verify()


def test_code_of_the_model_is_run_with_trust_remote_code(with_code: Path) -> None:
    open_source(ModelConfig(name=str(with_code), trust_remote_code=True))
    assert os.environ.pop(RAN) == "yes"


def test_a_tokenizer_with_code_is_not_run(model: Path) -> None:
    (model / "theirs.py").write_text(CODE)
    change(model / "tokenizer_config.json", tokenizer_class="Theirs", auto_map={"AutoTokenizer": ["theirs.A", None]})
    with pytest.raises(InputError, match=r"model\.trust_remote_code=true"):
        open_source(ModelConfig(name=str(model)))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_from_the_hub_is_code_too(model: Path, key: str) -> None:
    change(model / "config.json", **{key: "somebody/kernel"})
    with pytest.raises(InputError, match=r"code of the hub \(somebody/kernel\), which is not run"):
        open_source(ModelConfig(name=str(model)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__init__.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{% for x in range(999999999) %}x{% endfor %}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ '%c' | format(messages.__init__) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% set x = namespace.__init__.__globals__ %}{{ x }}",
    ],
)
def test_a_chat_template_reaches_nothing(model: Path, template: str) -> None:
    from covey.rollout.rendering import Renderer

    source = open_source(ModelConfig(name=str(model)))
    source.tokenizer.chat_template = template
    try:
        text = Renderer(source.tokenizer)._text([{"role": "user", "content": "hello"}], None, reply_next=True)
    except Exception as error:
        assert type(error).__module__.startswith(("jinja2", "covey")) or isinstance(error, OverflowError), error
        text = str(error)
    assert not any(word in text for word in ("root:", "builtins", "<class", "<module", "PATH")), text


# -- data and checkpoints ----------------------------------------------------------------------------------------------


def test_data_is_never_unpickled(tmp_path: Path) -> None:
    import base64

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = pickle.dumps(Bomb())
    array = np.empty(1, dtype=object)
    array[0] = Bomb()
    np.save(tmp_path / "rows.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match="unsupported file type"):
        read_table(tmp_path / "rows.npy")
    shutil.copy(tmp_path / "rows.npy", tmp_path / "rows.jsonl")
    with pytest.raises(InputError):
        read_table(tmp_path / "rows.jsonl")
    (tmp_path / "rows.parquet").write_bytes(body)
    with pytest.raises(InputError):
        read_table(tmp_path / "rows.parquet")
    meta = {b"pandas": json.dumps({"columns": [{"name": "answer", "pandas_type": "object"}]}).encode(), b"x": body}
    table = pa.table({"question": ["1+1"], "answer": [body]}).replace_schema_metadata(meta)
    pq.write_table(table, tmp_path / "good.parquet")
    (row,) = read_table(tmp_path / "good.parquet").rows
    assert row.values["answer"] == body, "bytes stay bytes"
    coded = base64.b64encode(body).decode()
    (tmp_path / "good.jsonl").write_text(json.dumps({"question": "1+1", "answer": coded, "py/object": coded}) + "\n")
    assert read_table(tmp_path / "good.jsonl").rows[0].values["answer"] == coded


def test_pickles_in_a_checkpoint_are_refused(model: Path, tmp_path: Path) -> None:
    source = open_source(ModelConfig(name=str(model), device="cpu"))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=False)
    learner = Learner(load_policy(source, ModelConfig(name=str(model), device="cpu")), LearnerConfig(), total_updates=1)
    saved = store.save(1, learner, source.tokenizer, {"source": {}, "best": None})
    for name in ("optimizer.pt", "optimizer.bin", "state.pt", "model/pytorch_model.bin", "model/training_args.bin"):
        plant(saved.folder / name, zipped=True)
        with pytest.raises(InputError, match=f"{name} is not in its manifest"):
            store.latest(lambda text: pytest.fail(text))
        (saved.folder / name).unlink()
    found = store.latest(lambda text: pytest.fail(text))
    assert found is not None
    learner.restore(found.folder, found.state["learner"])
    (found.folder / "optimizer.safetensors").write_bytes(plant(tmp_path / "bomb").read_bytes())
    with pytest.raises(InputError, match="does not match its checksum"):
        store.latest(lambda text: None)


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


# -- the source --------------------------------------------------------------------------------------------------------

FORBIDDEN = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "pickle", "jsonpickle", "_pickle", "telnetlib"}
# Where one of them has a place, and why: between processes of one's own, never from a file or a network.
ALLOWED = {
    "workers/handle.py": {"pickle"},  # forks of this process communicate over socket pairs
    "workers/pool.py": {"pickle"},
    "workers/worker.py": {"pickle"},
    "sandbox/tiers.py": {"marshal"},  # our own modules, sent into a sandbox; nothing comes back this way
}
CALLS = {"torch.load", "np.load", "numpy.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"}
COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list"}


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults_in(text: str, where: str = "") -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        roots = {module.partition(".")[0] for module in modules} & FORBIDDEN
        found += sorted(roots - ALLOWED.get(where, set()))
        found += [m for m in modules if m == "multiprocessing.connection"]
        if isinstance(node, ast.Call):
            found += faults_of_call(node)
    return found


def faults_of_call(node: ast.Call) -> list[str]:
    name, given = name_of(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
    last = name.rpartition(".")[2]
    found = [name] if name in CALLS or last in COLLECTIVES else []
    for key in ("allow_pickle", "trust_remote_code"):
        if isinstance(given.get(key), ast.Constant) and given[key].value is True:  # type: ignore[attr-defined]
            found.append(f"{key}=True")
    owner = name.rpartition(".")[0]
    if last == "from_pretrained" and owner.startswith("Auto"):
        found += [f"{name} without trust_remote_code"] if "trust_remote_code" not in given else []
        if owner.startswith("AutoModel") and not {"use_safetensors", "gguf_file"} & given.keys():
            found.append(f"{name} without use_safetensors")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from dill import loads", "import torch\ntorch.load(f)", "np.load(f, allow_pickle=True)",
        "AutoModelForCausalLM.from_pretrained(p, trust_remote_code=False)", "AutoTokenizer.from_pretrained(p)",
        "AutoConfig.from_pretrained(p, trust_remote_code=True)", "dist.all_gather_object(a, b)",
        "from multiprocessing.connection import Listener", "yaml.load(f)",
    ],
)  # fmt: skip
def test_the_search_finds_unsafe_calls(text: str) -> None:
    assert faults_in(text)


def test_nothing_in_the_source_reads_a_pickle() -> None:
    source = ROOT / "src" / "covey"
    files = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.py")}
    assert {name: faults for name, text in files.items() if (faults := faults_in(text, name))} == {}
    assert set(ALLOWED) <= set(files)
