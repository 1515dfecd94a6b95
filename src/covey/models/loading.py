"""Loading models by name: tokenizer, policy and frozen reference.

A name is a folder, a built-in model, or a Hugging Face id, in this order. An id may have a revision, ORG/NAME@REVISION.
All parts of a model are read at one commit, which a run records and uses again when it resumes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from covey.config.schema import ModelConfig
from covey.errors import Absent, InputError, nearest, unknown
from covey.memory import disable_cudnn_attention, keep_freed_memory
from covey.models.adapters import adapter_base, check_adapter_fits, with_new_adapter, with_saved_adapter
from covey.models.builtin import BUILTIN, builtin_folder, keep_compiled_code
from covey.models.families import auto_model, causal_lm, fixed_rope_length, vision_family
from covey.models.folder import (
    MAIN,
    check_buildable,
    check_generation,
    check_weights_fit,
    config_file,
    explain_errors,
    load_weights,
    read_config,
    read_tokenizer,
)
from covey.models.hub import split_revision
from covey.models.quantization import keep_format, load_options

if TYPE_CHECKING:
    from covey.models.vision import VisionProcessor


@dataclass(frozen=True)
class ModelSource:
    """The source of a model: its path, revision, configuration and tokenizer, read before the weights are loaded."""

    name: str
    path: str  # a folder, or a hub id
    tokenizer: Any
    config: Any
    adapter: Path | None = None  # a peft adapter folder on top of `path`
    revision: str | None = None  # the commit of the hub that all parts are read at
    headless: bool = False  # the output layer is not used, and may be missing
    vision: VisionProcessor | None = None  # of a vision-language model

    @property
    def context_length(self) -> int | None:
        longest = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return fixed_rope_length(self.config) or longest

    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end an answer: the tokenizer's, and those of the model's generation settings."""
        from transformers import GenerationConfig

        eos_ids = {self.tokenizer.eos_token_id}
        try:
            generation = GenerationConfig.from_pretrained(self.path, revision=self.revision or MAIN)
        except OSError:  # a model folder may have none
            generation = GenerationConfig()
        for ids in (generation.eos_token_id, self.config.get_text_config(decoder=True).eos_token_id):
            eos_ids |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
        return tuple(sorted(i for i in eos_ids if i is not None))


def parameter_count(source: ModelSource) -> int:
    """The parameters of the model, from its configuration alone."""
    with torch.device("meta"):
        return sum(p.numel() for p in auto_model(source.config).from_config(source.config).parameters())


def trained_count(source: ModelSource, config: ModelConfig) -> int:
    """An upper bound of the number of trained weights, before any is loaded. With an adapter, only its own."""
    if source.adapter is not None:
        size = sum(file.stat().st_size for file in source.adapter.glob("adapter_model.*"))
        return size // 2  # at two bytes or more each
    if config.lora.rank == 0:
        return parameter_count(source)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = with_new_adapter(auto_model(source.config).from_config(source.config), config, seed=0)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Located(NamedTuple):
    path: str  # a folder, or a hub id
    adapter: Path | None = None
    revision: str | None = None  # of a hub id that names one


def locate(name: str) -> Located:
    """The folder or hub id of a name, and the adapter folder if the name is one. Loads nothing."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            base = adapter_base(folder)
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


def model_path(name: str) -> str:
    """The name or path for transformers' `from_pretrained`: the folder of a built-in model, any other name
    unchanged."""
    return str(builtin_folder(name)) if name in BUILTIN and not Path(name).is_dir() else name


def open_source(config: ModelConfig, revision: str | None = None, *, headless: bool = False) -> ModelSource:
    """Read tokenizer and configuration, and check all that can be checked before weights are read.

    `revision`: the commit of a run that resumes. `headless`: the output layer is not used, and may be missing.
    """
    path, adapter, named = locate(config.name)
    trusted = config.trust_remote_code
    with explain_errors(config.name):
        revision = _commit(path, revision or named)
    model_config = read_config(config.name, path, revision=revision, trusted=trusted)
    tokenizer = read_tokenizer(config.name, path, model_config, revision=revision, trusted=trusted)
    longest = fixed_rope_length(model_config)
    if longest is not None and (config.context_length or 0) > longest:
        raise InputError(
            f"model.context_length={config.context_length}: {config.name} reads rows of more than {longest} tokens "
            f"with other rotary frequencies, which is not supported\n  use model.context_length={longest} or less"
        )
    auto = auto_model(model_config)  # slow: only once the model is found
    if Path(path).is_dir():
        folder = Path(path)
        check_generation(folder)
        check_weights_fit(auto, path, folder, model_config, headless=headless, trusted=trusted)
    else:
        check_buildable(auto, config.name, model_config, trusted=trusted)
    if adapter is not None:
        check_adapter_fits(adapter, model_config, trusted=trusted)
    vision = None
    if (family := vision_family(model_config)) is not None:
        from covey.models.vision import open_vision

        vision = open_vision(config, family, path, model_config, tokenizer, revision)
    return ModelSource(config.name, path, tokenizer, model_config, adapter, revision, headless, vision)


def _commit(path: str, revision: str | None) -> str | None:
    """The commit that a branch or tag of the hub points to now; None for a folder. All parts are read at it, since the
    hub may change in between."""
    if Path(path).is_dir():
        return None
    file = config_file(path, revision)
    return file.parent.name if file.parent.parent.name == "snapshots" else revision


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
    """The model to train, on its device. Dropout is removed: with it, learner and engine would differ."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        disable_cudnn_attention()
    keep_compiled_code()
    with explain_errors(source.name):
        model = load_weights(
            auto_model(source.config),
            source.name,
            source.path,
            revision=source.revision,
            headless=source.headless,
            trusted=config.trust_remote_code,
            dtype=dtype,
            attn_implementation="sdpa",  # replaced for training; a model's own may name code of the hub
            **load_options(config, device, dtype),
        )
    if config.quantization is None:
        model = model.to(device)
    else:
        keep_format(model)
    if source.adapter is not None:
        model = with_saved_adapter(model, source.adapter)
    elif config.lora.rank > 0:
        model = with_new_adapter(model, config, seed, source.revision)
    elif config.freeze_vision and vision_family(source.config) is not None:
        from covey.models.image_features import vision_weights

        for weight in vision_weights(model).values():
            weight.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    set_checkpointing(model, bool(config.gradient_checkpointing))
    return model


def set_checkpointing(model: Any, enabled: bool) -> None:
    """Whether the layers of a model recompute their activations in the backward pass."""
    lm = causal_lm(model)
    if enabled and not lm.supports_gradient_checkpointing:
        raise InputError(
            f"{lm.config.model_type} models cannot recompute activations: transformers does not support it\n"
            "  model.gradient_checkpointing=false, with shorter answers if memory is short"
        )
    if enabled:  # nothing in a layer is random, and reading a GPU's random state would wait for it
        options = {"use_reentrant": False, "preserve_rng_state": False}
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif lm.is_gradient_checkpointing:
        lm.gradient_checkpointing_disable()
    model.eval()  # in training mode some routers add noise, and ratios would not start at 1
    for module in lm.modules():
        if getattr(module, "gradient_checkpointing", False):  # works in training mode only: set here, not within layers
            module.training = True
    _disable_dropout(lm)


def _disable_dropout(lm: Any) -> None:
    """Without it a model computes the same in training mode. It is configured in some models, such as GPT-2."""
    for module in lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # given to torch's function: OPT, BioGPT
                setattr(module, name, 0.0)


class Reference:
    """The start policy, frozen: the policy itself with its adapter disabled, or a copy made before training. `move`
    replaces it with a later policy, of which it keeps the weights that are trained."""

    def __init__(self, model: Any, *, offload: bool = False) -> None:
        """`offload`: keep it in CPU memory while it is not used. This never moves the policy's own weights."""
        self.adapter = hasattr(model, "disable_adapter")
        self.model = model if self.adapter else model.requires_grad_(False).eval()
        self.device = next(model.parameters()).device
        self.offload = offload and not self.adapter and self.device.type != "cpu"
        self._moved_adapter: dict[str, torch.Tensor] = {}  # weights of the adapter, once it has moved
        self._users = 0
        if self.offload:
            self.model.to("cpu")

    @classmethod
    def of(cls, policy: Any, *, offload: bool = False) -> Reference:
        """The policy as it is now: with its adapter disabled, or copied."""
        return cls(policy if hasattr(policy, "disable_adapter") else copy.deepcopy(policy), offload=offload)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the weights on their device within this context. May be nested."""
        self._users += 1
        if self.offload and self._users == 1:
            self.model.to(self.device)
        try:
            yield
        finally:
            self._users -= 1
            if self.offload and self._users == 0:
                self.model.to("cpu")

    @contextmanager
    def active(self) -> Iterator[Any]:
        """The reference model. Only while nothing is sampled: disabling an adapter changes the shared module."""
        with self.loaded(), self._without_adapter() if self.adapter else nullcontext():
            yield self.model

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """The policy's adapter disabled, or exchanged for that of the policy that the reference has moved to."""
        if not self._moved_adapter:
            with self.model.disable_adapter():
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        live = _own_parts(self.model)
        for name, kept in self._moved_adapter.items():
            policy = live[name].clone()
            live[name].copy_(kept)
            kept.copy_(policy)

    @torch.no_grad()
    def move(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the trained weights, of which each rank passes its own part."""
        if self.adapter:
            self._moved_adapter = {name: part.clone() for name, part in weights.items()}
            return
        own = _own_parts(self.model)
        for name, part in weights.items():
            own[name].copy_(part)

    def moved_weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """This rank's part of the weights with these names; none if an adapter has never moved."""
        own = self._moved_adapter if self.adapter else _own_parts(self.model)
        return {name: own[name] for name in names if name in own}


def _own_parts(model: Any) -> dict[str, torch.Tensor]:
    """This rank's memory of every weight. Writing to it is not seen by autograd."""
    weights = model.named_parameters()
    return {name: (w.to_local() if hasattr(w, "to_local") else w).data for name, w in weights}
