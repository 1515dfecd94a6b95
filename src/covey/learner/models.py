"""From a model's name to a tokenizer, a policy and its frozen reference.

A name is a folder, a built-in model, or a Hugging Face id, in this order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from covey.config.schema import ModelConfig
from covey.errors import Absent, InputError, nearest, unknown
from covey.learner.builtin import BUILTIN, builtin_folder
from covey.learner.memory import keep_freed_memory


@dataclass(frozen=True)
class ModelSource:
    """Where a model is loaded from, with what can be known of it before its weights are."""

    name: str
    path: str  # a folder, or a hub id
    tokenizer: Any
    config: Any
    adapter: Path | None = None  # a peft adapter folder on top of `path`

    @property
    def context_length(self) -> int | None:
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the tokenizer's, and what the model's generation settings add."""
        from transformers import GenerationConfig

        found = {self.tokenizer.eos_token_id}
        try:
            generation = GenerationConfig.from_pretrained(self.path)
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


def locate(name: str) -> tuple[str, Path | None]:
    """The folder or hub id behind a name, and the adapter folder where the name is one. Loads nothing."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            base = _adapter_base(folder)
            return locate(base)[0], folder
        if not (folder / "config.json").is_file():
            raise InputError(f"{name} is a folder without a model: config.json is missing")
        return str(folder), None
    if name in BUILTIN:
        return str(builtin_folder(name)), None
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name, None
    lines = [f"unknown model  {name}"]
    if guess := nearest(name, BUILTIN):
        lines.append(f"  did you mean   {guess}?")
    lines.append(f"  a model is a folder, a Hugging Face id (ORG/NAME), or built in: {', '.join(BUILTIN)}")
    raise InputError("\n".join(lines))


def _adapter_base(folder: Path) -> str:
    import json

    return str(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])


def open_source(config: ModelConfig) -> ModelSource:
    """Tokenizer and configuration; weights are not read yet."""
    from transformers import AutoConfig, AutoTokenizer

    path, adapter = locate(config.name)
    with _explain_unreachable(config.name):
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    return ModelSource(config.name, path, tokenizer, model_config, adapter)


@contextmanager
def _explain_unreachable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Absent(
            f"cannot load model  {name}\n  {str(error).splitlines()[0]}\n"
            "  a private or gated model needs HF_TOKEN in the environment\n"
            "  no connection to the hub? copy the model's folder here and use model=/path/to/folder,\n"
            "  or use the built-in model=smollm2-135m"
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
    with _explain_unreachable(source.name):
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=pick_dtype(config.dtype, device),
            trust_remote_code=config.trust_remote_code,
            attn_implementation="sdpa",
        )
    model = model.to(device)
    if source.adapter is not None:
        model = _with_saved_adapter(model, source.adapter)
    elif config.lora.rank > 0:
        model = _with_new_adapter(model, config, seed)
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


def _with_new_adapter(model: Any, config: ModelConfig, seed: int) -> Any:
    peft = require_peft()
    torch.manual_seed(seed)  # the adapter's A matrices start random
    lora = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora)


def _with_saved_adapter(model: Any, folder: Path) -> Any:
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
