"""From a model's name to a tokenizer, a policy and its frozen reference.

A name is a folder, a built-in model, or a Hugging Face id, in this order. An id may name a revision, ORG/NAME@REVISION;
whether it does or not, all parts of a model are read at one commit, which a run writes down and goes on with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from covey.config.schema import ModelConfig
from covey.errors import Absent, InputError, nearest, unknown
from covey.learner.builtin import BUILTIN, builtin_folder
from covey.learner.memory import keep_freed_memory, without_plans_by_shape
from covey.trust import FIX, check_adapter, check_config, check_weights, no_pickles, split_revision

MAIN = "main"  # the hub's name for what is current


@dataclass(frozen=True)
class ModelSource:
    """Where a model is loaded from, with what can be known of it before its weights are."""

    name: str
    path: str  # a folder, or a hub id
    tokenizer: Any
    config: Any
    adapter: Path | None = None  # a peft adapter folder on top of `path`
    revision: str | None = None  # of the hub: the commit that all parts are read at

    @property
    def context_length(self) -> int | None:
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the tokenizer's, and what the model's generation settings add."""
        from transformers import GenerationConfig

        found = {self.tokenizer.eos_token_id}
        try:
            generation = GenerationConfig.from_pretrained(self.path, revision=self.revision or MAIN)
        except OSError:  # a model folder need not have one
            generation = GenerationConfig()
        for ids in (generation.eos_token_id, self.config.get_text_config(decoder=True).eos_token_id):
            found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
        return tuple(sorted(i for i in found if i is not None))


def parameter_count(source: ModelSource) -> int:
    """Of the whole model, from its configuration alone."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(source.config).parameters())


def trained_count(source: ModelSource, config: ModelConfig) -> int:
    """How many weights are trained, at most, before any is loaded: with adapters, only theirs."""
    from transformers import AutoModelForCausalLM

    if source.adapter is not None:
        return (
            sum(file.stat().st_size for file in source.adapter.glob("adapter_model.*")) // 2
        )  # two bytes or more each
    if config.lora.rank == 0:
        return parameter_count(source)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = _with_new_adapter(AutoModelForCausalLM.from_config(source.config), config, seed=0)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Located(NamedTuple):
    path: str  # a folder, or a hub id
    adapter: Path | None = None
    revision: str | None = None  # of a hub id, where the name has one


def locate(name: str) -> Located:
    """The folder or hub id behind a name, and the adapter folder where the name is one. Loads nothing."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            base = _adapter_base(folder)
            if Path(base).expanduser().resolve() == folder.resolve():
                raise InputError(f"{folder} is an adapter for itself\n  its adapter_config.json must name a model")
            return locate(base)._replace(adapter=folder)
        if not (folder / "config.json").is_file():
            raise InputError(f"{name} is a folder without a model: config.json is missing")
        return Located(str(folder))
    if name in BUILTIN:
        return Located(str(builtin_folder(name)))
    ident, revision = split_revision(name)
    if ident.count("/") == 1 and not name.startswith((".", "/", "~")):
        return Located(ident, None, revision)
    lines = [f"unknown model  {name}"]
    if guess := nearest(name, BUILTIN):
        lines.append(f"  did you mean   {guess}?")
    lines.append(f"  a model is a folder, a Hugging Face id (ORG/NAME), or built in: {', '.join(BUILTIN)}")
    raise InputError("\n".join(lines))


def _adapter_base(folder: Path) -> str:
    import json

    about = json.loads((folder / "adapter_config.json").read_text())
    base, revision = str(about["base_model_name_or_path"]), about.get("revision")
    return f"{base}@{revision}" if revision and not Path(base).expanduser().is_dir() and base not in BUILTIN else base


def open_source(config: ModelConfig, revision: str | None = None) -> ModelSource:
    """Tokenizer and configuration; weights are not read yet. `revision`: where a run began, if it goes on."""
    from transformers import AutoConfig, AutoTokenizer

    path, adapter, named = locate(config.name)
    trusted = config.trust_remote_code
    with _explain_unreachable(config.name):
        revision = _commit(path, revision or named)
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trusted, revision=revision or MAIN)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, revision=revision or MAIN)
    if not config.trust_remote_code:
        check_config(config.name, model_config)
    if Path(path).is_dir():
        check_weights(Path(path), model_config)
    if adapter is not None:
        check_adapter(adapter)
    return ModelSource(config.name, path, tokenizer, model_config, adapter, revision)


def _commit(path: str, revision: str | None) -> str | None:
    """The commit of a hub's model behind a branch or tag; None for a folder. The hub may change while we read: once it
    is known, everything is read there."""
    from transformers.utils import cached_file

    if Path(path).is_dir():
        return None
    found = Path(str(cached_file(path, "config.json", revision=revision or MAIN)))
    return found.parent.name if found.parent.parent.name == "snapshots" else revision


@contextmanager
def _explain_unreachable(name: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"the weights of {name} are damaged: {error}\n  bring them back from a copy") from error
    except OSError as error:
        if "use_safetensors" in str(error):
            raise InputError(f"{name} has its weights as a pickle only, which is not loaded\n{FIX}") from error
        raise Absent(
            f"cannot load model  {name}\n  {str(error).splitlines()[0]}\n"
            "  a private or gated model needs HF_TOKEN in the environment\n"
            "  no connection to the hub? copy the model's folder here and use model=/path/to/folder,\n"
            "  or use the built-in model=smollm2-135m"
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            f"{name} brings Python code of its own, which is not run\n"
            "  read it, and where you trust it: model.trust_remote_code=true"
        ) from error


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise InputError(f"model.device={name[:60]}: {why:.200}\n  use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"model.device={name}: training runs on cpu or cuda\n  use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Absent(f"model.device={name}, but torch sees no GPU here\n  use model.device=auto or cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise unknown("model.dtype", name, ["auto", *known])
    return known[name]


def load_policy(source: ModelSource, config: ModelConfig, *, seed: int = 0) -> Any:
    """The model to train, on its device, without dropout (it would part the learner from the sampler)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        without_plans_by_shape()
    with _explain_unreachable(source.name), no_pickles(source.name):
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=pick_dtype(config.dtype, device),
            trust_remote_code=config.trust_remote_code,
            attn_implementation="sdpa",  # ours, also because a model's own may name code of the hub
            use_safetensors=True,
            revision=source.revision or MAIN,
        )
    model = model.to(device)
    if source.adapter is not None:
        model = _with_saved_adapter(model, source.adapter)
    elif config.lora.rank > 0:
        model = _with_new_adapter(model, config, seed, source.revision)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora.rank > 0:
            model.enable_input_require_grads()
    # Gradient checkpointing works in training mode only; without dropout the modes do not differ otherwise.
    return model.train(config.gradient_checkpointing)


def require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError("model.lora needs peft:  pip install 'covey[lora]'") from error
    return peft


def _with_new_adapter(model: Any, config: ModelConfig, seed: int, revision: str | None = None) -> Any:
    peft = require_peft()
    torch.manual_seed(seed)  # the adapter's A matrices start random
    lora = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        revision=revision,  # of the model below: who loads the adapter finds the same
    )
    return peft.get_peft_model(model, lora)


def _with_saved_adapter(model: Any, folder: Path) -> Any:
    with no_pickles(str(folder)):
        return require_peft().PeftModel.from_pretrained(model, folder, is_trainable=True)


class Reference:
    """The start policy, frozen: the policy itself with its adapter off, or a copy made before training."""

    def __init__(self, model: Any, *, offload: bool = False) -> None:
        """`offload`: it waits in CPU memory while it is not asked. The policy's own weights never do."""
        self.adapter = hasattr(model, "disable_adapter")
        self.model = model if self.adapter else model.requires_grad_(False).eval()
        self.home = next(model.parameters()).device
        self.offload = offload and not self.adapter and self.home.type != "cpu"
        self._askers = 0
        if self.offload:
            self.model.to("cpu")

    @classmethod
    def of(cls, policy: Any, *, offload: bool = False) -> Reference:
        """The policy as it is now: with its adapter off, or copied."""
        return cls(policy if hasattr(policy, "disable_adapter") else copy.deepcopy(policy), offload=offload)

    @contextmanager
    def present(self) -> Iterator[None]:
        """While this lasts, the weights are where they are needed."""
        self._askers += 1
        if self.offload and self._askers == 1:
            self.model.to(self.home)
        try:
            yield
        finally:
            self._askers -= 1
            if self.offload and self._askers == 0:
                self.model.to("cpu")

    @contextmanager
    def active(self) -> Iterator[Any]:
        """The reference model; only while nothing samples, since switching an adapter off flips the shared module."""
        with self.present(), self.model.disable_adapter() if self.adapter else nullcontext():
            yield self.model
