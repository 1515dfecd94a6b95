"""Reading a model's files: configuration, tokenizer and weights, with checks that they belong together.

transformers initialises missing weights at random. Here every model (policy, critic, reward model, export) is loaded by
`load_weights`, which refuses such a model instead and names the tensors. `check_weights_fit` makes the same call on
torch's meta device, which reads only the headers of the files. So a model folder is checked before a run starts; a
model of the hub is checked when it is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.errors import Absent, InputError, nearest
from covey.models import hub
from covey.models.hub import FIX, check_config, no_pickles, weight_files

MAIN = "main"  # the hub's default revision
SHOWN = 4  # tensors that a message names
# Upper limits for a configuration; all are at least 1. Some negative sizes give shapes that fit, and a billion layers
# would take hours to build.
MAX_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 1_000_000),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size"), 10_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 2**40),
}
LFS = b"version https://git-lfs"
AGAIN = "  fix: copy or download it again"


class RemoteCodeNeeded(InputError):
    """A model that needs Python code from its own folder, which is not run."""


class WeightsMismatch(InputError):
    """Weights and configuration are of different models."""

    def __init__(self, text: str, missing_heads: Sequence[str] = ()) -> None:
        super().__init__(text, missing_heads)  # both: an exception is pickled by its arguments
        self.text = text
        self.missing_heads = tuple(missing_heads)  # the missing tensors, if only output heads are missing

    def __str__(self) -> str:
        return self.text


# -- Configuration -----------------------------------------------------------------------------------------------------


def read_config(name: str, path: str, *, revision: str | None = None, trusted: bool = False) -> Any:
    """The configuration of a folder or hub id. `trusted`: Python code of the model may run."""
    from transformers import AutoConfig

    with explain_errors(name):
        file = config_file(path, revision)
    _check_json(file)
    with explain_errors(name):
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trusted, revision=revision or MAIN)
        except (InputError, OSError):
            raise
        except Exception as error:  # a wrong value may raise anything
            raise _bad_config(file, error) from error
    if not trusted:
        check_config(name, config)
    return config


def config_file(path: str, revision: str | None) -> Path:
    """config.json of a folder, or of a hub id: from the hub's cache, downloaded if necessary."""
    from transformers.utils import cached_file

    if Path(path).is_dir():
        return Path(path) / "config.json"
    hub.check_reachable()
    return Path(str(cached_file(path, "config.json", revision=revision or MAIN)))


def read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON ({reason(error)})\n{AGAIN}") from error
    if not isinstance(data, dict):
        raise InputError(f"{file}: expected an object, got {data!r:.60}\n{AGAIN}")
    return data


def _check_json(file: Path) -> None:
    config = read_object(file)
    if "model_type" not in config:
        raise InputError(f"{file} has no model_type\n{AGAIN}")
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        _check_sizes(file, part)


def _check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    for key, most in MAX_SIZES.items():
        value = config.get(key)
        if isinstance(value, int | float) and not 1 <= value <= most:
            raise InputError(f"{file}: {key} is {value}; it must be from 1 to {most:,}\n{AGAIN}")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise InputError(
            f"{file}: num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}\n{AGAIN}"
        )


def _bad_config(file: Path, error: Exception) -> InputError:
    from transformers import CONFIG_MAPPING, __version__

    kind = str(json.loads(file.read_bytes()).get("model_type"))
    if "trust_remote_code" in str(error):
        return _needs_remote_code(str(file.parent))
    if kind in CONFIG_MAPPING:
        return InputError(f"{file}: not a valid configuration of {kind} ({reason(error)})\n{AGAIN}")
    guess = nearest(kind, CONFIG_MAPPING)
    hint = f"  did you mean   {guess}?" if guess else "  a newer version of transformers may know it"
    return InputError(f"{file}: transformers {__version__} has no model_type {kind}\n{hint}")


def _needs_remote_code(name: str) -> RemoteCodeNeeded:
    return RemoteCodeNeeded(
        f"{name} comes with its own Python code, which is not run\n"
        "  read it, and if you trust it: model.trust_remote_code=true"
    )


# -- Tokenizer ---------------------------------------------------------------------------------------------------------


def read_tokenizer(name: str, path: str, config: Any, *, revision: str | None = None, trusted: bool = False) -> Any:
    """The tokenizer of a folder or hub id. The model must have an embedding of each of its tokens."""
    from transformers import AutoTokenizer

    with explain_errors(name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, revision=revision or MAIN)
        except (InputError, ImportError):
            raise
        except OSError:
            if not Path(path).is_dir():
                raise
            raise _no_tokenizer(path, None) from None
        except Exception as error:  # tokenizers raise various errors for unreadable files
            if "trust_remote_code" in str(error):
                raise _needs_remote_code(name) from error
            raise _no_tokenizer(path, error) from error
    known = set(tokenizer("The answer is 12.", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}
    if not known:  # without files, transformers makes some tokenizers with an empty vocabulary
        raise _no_tokenizer(path, None)
    check_ids(name, tokenizer, config, _ids_of_text(tokenizer))
    return tokenizer


def _no_tokenizer(path: str, error: Exception | None) -> InputError:
    fix = "  fix: copy the tokenizer's files (tokenizer.json, tokenizer_config.json) of the model it was made from"
    why = "" if error is None else f"\n  {reason(error)}"
    if Path(path).is_dir() and not (Path(path) / "tokenizer.json").is_file():
        return InputError(f"{path} has no tokenizer that can be read: tokenizer.json is missing{why}\n{fix}")
    return InputError(f"the tokenizer of {path} cannot be read{why}\n{fix}")


def _ids_of_text(tokenizer: Any) -> set[int]:
    """Ids that text and the end of an answer can have. Other special tokens, for padding or images, may lack an
    embedding: `check_ids` looks for them in the prompts."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = set(tokenizer.get_vocab().values()) - special
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def check_ids(name: str, tokenizer: Any, config: Any, ids: Iterable[int]) -> None:
    """Refuse token ids without an embedding."""
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(ids, default=-1)
    if rows is None or largest < rows:
        return
    token = tokenizer.convert_ids_to_tokens(largest)
    raise InputError(
        f"{name}: its tokenizer has token {largest} ({token!r}), but the model's embedding has {rows} rows\n"
        "  the tokenizer belongs to another model, or has added tokens that this model lacks\n"
        "  fix: copy the tokenizer's files that belong to these weights"
    )


# -- Weights -----------------------------------------------------------------------------------------------------------


def check_weights_fit(
    auto: Any, name: str, folder: Path, config: Any, *, headless: bool = False, trusted: bool = False
) -> None:
    """Before weights are read, check that the files are complete and have the tensors that `auto` needs.

    A model with its own code or quantised weights is checked only when it is loaded: building it may need a GPU or
    other packages."""
    for file in weight_files(folder, config):
        check_file(file)
    if _cannot_build_here(config, trusted):
        return
    empty: dict[str, Any] = {"device_map": {"": "meta"}, "attn_implementation": "eager"}
    with explain_errors(name), _buildable(auto, str(folder / "config.json"), config):
        load_weights(auto, name, str(folder), headless=headless, trusted=trusted, **empty)


def check_buildable(auto: Any, name: str, config: Any, *, trusted: bool = False) -> None:
    """Check that the configuration describes a model, before its weights are downloaded."""
    if not _cannot_build_here(config, trusted):
        built_empty(auto, name, config, trusted=trusted)


def built_empty(auto: Any, name: str, config: Any, *, trusted: bool = False) -> Any:
    """The model on torch's meta device, without weights."""
    import torch

    with _buildable(auto, f"the configuration of {name}", config), torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trusted, attn_implementation="eager")


def _cannot_build_here(config: Any, trusted: bool) -> bool:
    own_code = trusted and getattr(config, "auto_map", None) is not None
    return own_code or getattr(config, "quantization_config", None) is not None


@contextmanager
def _buildable(auto: Any, place: str, config: Any) -> Iterator[None]:
    """Explain errors of a wrong configuration while a model is built on the meta device."""
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            task = auto.__name__.removeprefix("AutoModelFor")
            raise InputError(
                f"{place}: transformers has no {config.model_type} model for {task}\n"
                "  fix: use a model of another kind, such as Llama or Qwen"
            ) from error
        raise InputError(
            f"{place}: a {config.model_type} model cannot be built from it ({reason(error)})\n{AGAIN}"
        ) from error


def check_generation(folder: Path) -> None:
    """generation_config.json is optional; if present, it names the tokens that end an answer."""
    file = folder / "generation_config.json"
    if file.is_file():
        read_object(file)


def check_file(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise InputError(f"{file} is missing\n{AGAIN}")
    try:
        with safe_open(file, framework="pt"):
            return
    except SafetensorError as error:
        with file.open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                raise InputError(f"{file} is a Git LFS pointer, not the weights\n  fix: git lfs pull") from error
        why = str(error).removeprefix("Error while deserializing header: ")
        raise InputError(f"{file} is damaged: {file.stat().st_size:,} bytes, {why}\n{AGAIN}") from error


def load_weights(
    auto: Any,
    name: str,
    path: str,
    *,
    revision: str | None = None,
    headless: bool = False,
    trusted: bool = False,
    **options: Any,
) -> Any:
    """`auto.from_pretrained`, for safetensors that contain every tensor of the model. `headless`: the output layer is
    not used and may be missing."""
    from transformers.utils.logging import disable_progress_bar

    from covey.models.generation import keep_generation

    disable_progress_bar()
    with no_pickles(name), _without_report():
        model, info = auto.from_pretrained(
            path,
            trust_remote_code=trusted,
            use_safetensors=True,
            revision=revision or MAIN,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **options,
        )
    unused = _output_layer(model) if headless else ()
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(unused))
    shapes = sorted((key, *map(list, sizes)) for key, *sizes in info["mismatched_keys"] if not key.startswith(unused))
    in_layers = sorted(key for key in info["unexpected_keys"] if _is_of_layers(model, key))
    if missing or shapes or in_layers:
        extra = sorted(info["unexpected_keys"]) if missing else in_layers
        heads = [key for key in missing if not key.startswith(f"{model.base_model_prefix}.")]
        only_heads = heads == missing and not shapes and not in_layers
        raise WeightsMismatch(_not_fitting(name, model, missing, shapes, extra), heads if only_heads else ())
    keep_generation(model)
    for module in model.modules():  # outputs are read by name, also by transformers itself
        config: Any = getattr(module, "config", None)
        if hasattr(config, "return_dict"):
            config.return_dict = True
    return model


def _output_layer(model: Any) -> tuple[str, ...]:
    head = model.get_output_embeddings()
    return tuple(f"{name}." for name, module in model.named_modules() if module is head)


def _is_of_layers(model: Any, key: str) -> bool:
    """Whether an unexpected tensor belongs to a layer of the model, or to an additional layer. Others are harmless: the
    head of another task, a vision tower, multi-token prediction layers."""
    import torch

    modules = dict(model.named_modules())
    ahead = getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
    parts = key.split(".")
    for at in range(1, len(parts)):
        layers = modules.get(".".join(parts[:at]))
        if isinstance(layers, torch.nn.ModuleList):
            return not (parts[at].isdecimal() and len(layers) <= int(parts[at]) < len(layers) + ahead)
    owner = modules.get(".".join(parts[:-1]))
    return owner is not None and any(True for _ in owner.parameters(recurse=False))


def _not_fitting(name: str, model: Any, missing: list[str], shapes: list[tuple[Any, ...]], extra: list[str]) -> str:
    lines = [f"{name}: its weights do not fit its config.json, a {type(model).__name__}"]
    if missing:
        lines.append(f"  missing from the weights: {first_few(missing)}")
    if shapes:
        changed = [f"{key} {shape}, not {expected}" for key, shape, expected in shapes]
        lines.append(f"  of another shape in the weights: {first_few(changed)}")
    if extra:
        lines.append(f"  in the weights, but not in the model: {first_few(extra)}")
    lines.append("  fix: copy or download config.json and the weights again, both from the same model")
    return "\n".join(lines)


def first_few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of mismatches: `WeightsMismatch` reports them."""
    report = logging.getLogger("transformers.modeling_utils")

    def drop(record: logging.LogRecord) -> bool:
        return False

    report.addFilter(drop)
    try:
        yield
    finally:
        report.removeFilter(drop)


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Turn errors of the libraries that read the model `name` into messages with a fix."""
    from safetensors import SafetensorError

    try:
        yield
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(f"the weights of {name} are damaged: {error}\n{AGAIN}") from error
    except ImportError as error:
        raise Absent(f"{name} cannot be loaded without another package: {reason(error)}") from error
    except OSError as error:
        if "use_safetensors" in str(error):
            raise InputError(f"{name} has its weights only as a pickle, which is not loaded\n{FIX}") from error
        raise Absent(
            f"cannot load model  {name}\n  {hub.unreachable() or str(error).splitlines()[0]}\n"
            "  a private or gated model needs HF_TOKEN in the environment\n"
            "  no connection to the hub? copy the model's folder here and use model=/path/to/folder,\n"
            "  or use the built-in model=smollm2-135m"
        ) from error
    except ValueError as error:
        if "scaled_dot_product_attention" in str(error):
            text = f"{name} cannot be trained: transformers has no `sdpa` attention for this kind of model"
            raise InputError(f"{text}\n  fix: use a model of another kind, such as Llama or Qwen") from error
        if "trust_remote_code" not in str(error):
            raise
        raise _needs_remote_code(name) from error


def reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:300] or type(error).__name__
