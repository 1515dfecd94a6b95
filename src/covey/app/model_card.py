"""The model card of a run (README.md of a model repository), and the files for llama.cpp and Ollama, from the run's
folder: base model, data, reward, algorithm, settings, curve, evaluation with intervals, and how to repeat it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from covey.algorithms import algorithm_schemas
from covey.config.read import load_yaml
from covey.config.settings import algorithm_settings, schema_settings
from covey.evaluation.statistics import wilson
from covey.models.builtin import BUILTIN
from covey.redact import hide_settings
from covey.telemetry.base import flatten
from covey.telemetry.history import History, read_history, read_run
from covey.telemetry.key_metrics import format_duration
from covey.telemetry.report import block, code, plain, summarise

COVEY = "https://github.com/covey-rl/covey"
CONFIG = "covey.yaml"  # the run's configuration in the repository
SHOWN = ("data.", "agent.", "reward.", "algorithm.", "rollout.", "learner.", "critic.", "model.", "mode.", "seed")
HIDDEN = ("model.name", "model.device", "algorithm.name", "data.train_files", "data.val_files")
LONGEST = 120  # characters of a value in the table
TEXTS = ("system_prompt", "stop")  # settings that the model reads or writes: nothing in them is a path
FOLDERS = re.compile(r"""(?<![\w/.~-])(?:file://)?(?:~|\.\.)?/(?:[^\s/'"]+/)+(?=[^\s/'"])""")  # before a name
# Text models of transformers that llama.cpp's convert_hf_to_gguf.py reads.
GGUF = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM"),
        *("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"),
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM"),
        *("OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "GraniteForCausalLM", "CohereForCausalLM"),
        *("Starcoder2ForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM", "DeepseekV2ForCausalLM"),
    }
)


def model_card(run: Path, step: int, folder: Path, repo: str, evaluations: Sequence[Path] = ()) -> str:
    """The card of the model in `folder`, which is the run's after `step` updates. `evaluations`: folders of covey eval,
    whose tables are included."""
    info, summary, config = read_run(run), summarise(run), settings_of(run)
    base = hub_name(config["model.name"])
    adapter = (folder / "adapter_config.json").is_file()
    sees = _sees_images(run, folder)
    command = " ".join(shlex.split(info["command"])[:2])
    reward = f" with the reward {code(info['trained_reward'])}" if info["trained_reward"] else ""
    trained = (
        f"{plain(base)} trained with **{plain(info['algorithm'])}** on {plain(info['task'])}{reward}, "
        f"{step} updates, by [Covey]({COVEY})."
    )
    facts = [
        f"{summary.steps} steps, {summary.tokens:,.0f} sampled tokens, {format_duration(summary.seconds)} "
        f"on {plain(info.get('device', 'an unknown device'))}",
        f"rewards: {', '.join(map(code, info['reward_names'])) or 'none'}",
        "versions: " + plain(", ".join(f"{name} {text}" for name, text in info.get("versions", {}).items())),
    ]
    blocks = [
        [_front_matter(base, str(info["algorithm"]), adapter, sees=sees)],
        [f"# {plain(repo.rpartition('/')[2])}", "", trained],
        ["![reward and held-out accuracy](curve.png)"],
        ["## Evaluation", "", *_evaluation(info, config, read_history(run), step)],
        *([f"### {plain(path.name)}", "", (path / "results.md").read_text().strip()] for path in evaluations),
        ["## Training", "", *(f"- {fact}" for fact in facts), "", *_settings_table(config, str(info["algorithm"]))],
        ["## Reproduce", "", block(f"{command} --config {CONFIG}", "sh")],
        ["## Use", "", block(_usage(repo, base, adapter, sees=sees), "python")],
        ["## llama.cpp and Ollama", "", *_conversion(folder, base, adapter)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def settings_of(run: Path) -> dict[str, Any]:
    """The run's settings by dotted name, without secrets and folders of this machine."""
    return flatten(public_settings(run))


def public_settings(run: Path) -> dict[str, Any]:
    """The run's configuration without secrets and folders of this machine."""
    tree: dict[str, Any] = hide_folders(hide_settings(load_yaml(run / "config.yaml")))
    return tree


def hide_folders(tree: Any) -> Any:
    """Settings with the last part of every absolute path alone, as a path: a model `./NAME` is in a folder."""
    if isinstance(tree, Mapping):
        return {key: value if key in TEXTS else hide_folders(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hide_folders(value) for value in tree]
    return FOLDERS.sub(lambda path: "" if path.start() else "./", tree) if isinstance(tree, str) else tree


def _sees_images(run: Path, folder: Path) -> bool:
    """Whether it is a vision-language model. An adapter in `folder` may have no image processor; a checkpoint has."""
    name = "preprocessor_config.json"
    return (folder / name).is_file() or any(run.glob(f"checkpoints/*/model/{name}"))


def hub_name(model: str) -> str:
    """A name for a base model: its id on the hub, or the last part of a folder, since its path would reveal the
    machine."""
    if model in BUILTIN:
        return f"HuggingFaceTB/{BUILTIN[model]}"
    is_folder = model.startswith(("/", ".", "~")) or model.count("/") != 1 or Path(model).expanduser().exists()
    return Path(model).name if is_folder else model.partition("@")[0]


def _front_matter(base: str, algorithm: str, adapter: bool, *, sees: bool) -> str:
    fields: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if sees else "text-generation",
        "tags": ["covey", "reinforcement-learning", algorithm],
    }
    if "/" in base:
        fields |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _evaluation(info: Mapping[str, Any], config: Mapping[str, Any], history: History, step: int) -> list[str]:
    """The held-out metrics before training and of these weights, shares with their 95 % interval over tasks."""
    known = {record.step: record.metrics for record in history.evaluations}
    if (after := known.get(step)) is None:
        return ["These weights were not evaluated in the run." if known else "The run was not evaluated."]
    before = known.get(0, {})
    tasks = info.get("held_out") or config.get("data.val_size")
    lines = ["| metric | before | after | 95 % interval |", "|---|---:|---:|---|"]
    for key in sorted(key for key in after if key.startswith("eval/")):
        values = [metrics[key] for metrics in known.values() if key in metrics]
        share = all(0 <= value <= 1 for value in values)
        low_high = ""
        if share and isinstance(tasks, int) and tasks > 0:
            low, high = wilson(after[key], tasks)
            low_high = f"{low:.3f} to {high:.3f}"
        first = f"{before[key]:.3f}" if key in before else ""
        lines.append(f"| {code(key)} | {first} | {after[key]:.3f} | {low_high} |")
    count = f"{tasks} held-out tasks. " if tasks else ""
    return [*lines, "", f"{count}Intervals are Wilson's over tasks; before is the base model."]


def _settings_table(config: Mapping[str, Any], algorithm: str) -> list[str]:
    """The settings that differ from their defaults."""
    schemas = algorithm_schemas()
    known = schema_settings() | (algorithm_settings(algorithm, schemas) if algorithm in schemas else {})
    lines = []
    for key, value in config.items():
        default = known[key].default if key in known else None
        if key.startswith(SHOWN) and key not in HIDDEN and value != default and value != {}:
            text = json.dumps(value, ensure_ascii=False, default=str)
            lines.append(f"| {code(key)} | {code(text if len(text) <= LONGEST else text[: LONGEST - 1] + '…')} |")
    return ["| setting | value |", "|---|---|", *lines] if lines else ["All settings have their defaults."]


def _usage(repo: str, base: str, adapter: bool, *, sees: bool) -> str:
    if adapter:
        auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
        return (
            f"from peft import PeftModel\nfrom transformers import {auto}\n\n"
            f"model = PeftModel.from_pretrained({auto}.from_pretrained({base!r}), {repo!r})"
        )
    if sees:
        return (
            "from transformers import pipeline\n\n"
            f"generate = pipeline('image-text-to-text', {repo!r})\n"
            "content = [{'type': 'image', 'image': 'picture.png'}, {'type': 'text', 'text': '...'}]\n"
            "print(generate(text=[{'role': 'user', 'content': content}])[0]['generated_text'][-1])"
        )
    return (
        "from transformers import pipeline\n\n"
        f"generate = pipeline('text-generation', {repo!r})\n"
        "print(generate([{'role': 'user', 'content': '...'}])[0]['generated_text'][-1])"
    )


# -- llama.cpp and Ollama ----------------------------------------------------------------------------------------------


def not_for_gguf(folder: Path) -> str | None:
    """Why llama.cpp cannot convert the model in this folder; None if it can. Of an adapter, the base model decides."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    names = json.loads(path.read_text()).get("architectures") or ["a model without a named architecture"]
    if names[0] in GGUF:
        return None
    return f"{names[0]} is not among the architectures that Covey knows llama.cpp to convert"


def modelfile(config: Mapping[str, Any], adapter: bool) -> str:
    """Ollama's description of the converted model, whose chat template is in the GGUF file."""
    lines = ["FROM ./base.gguf\nADAPTER ./adapter.gguf" if adapter else "FROM ./model.gguf"]
    lines += [f"PARAMETER num_predict {config['rollout.max_tokens']}"]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in config.get("rollout.stop") or ()]
    if prompt := config.get("data.system_prompt"):
        # Three quotes end the text wherever they are, and there is no way to escape them.
        prompt = prompt.replace('"""', "'''") + (" " if prompt.endswith('"') else "")
        lines += [f'SYSTEM """{prompt}"""']
    return "\n".join(lines) + "\n"


def _conversion(folder: Path, base: str, adapter: bool) -> list[str]:
    if (reason := not_for_gguf(folder)) is not None:
        return [f"Not converted: {plain(reason)}."]
    commands = ["python llama.cpp/convert_hf_to_gguf.py FOLDER --outfile model.gguf --outtype bf16"]
    if adapter:
        commands = [
            f"python llama.cpp/convert_hf_to_gguf.py BASE --outfile base.gguf --outtype bf16     # {base}",
            "python llama.cpp/convert_lora_to_gguf.py FOLDER --base BASE --outfile adapter.gguf",
        ]
    commands += ["ollama create NAME -f Modelfile"]
    return [block("\n".join(commands), "sh"), "", "FOLDER is a copy of this repository; the `Modelfile` is in it."]
