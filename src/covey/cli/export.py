"""covey export: an ordinary model folder out of a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from covey.cli.runs import best_model, is_run, named_model, run_of
from covey.cli.words import parse
from covey.errors import InputError

USAGE = """\
covey export CHECKPOINT_OR_RUN OUT [--dtype bfloat16] [--adapter]

  Writes a model folder that other programs load: safetensors (in several files where they are large), configuration,
  tokenizer. Of a run, the checkpoint with the best evaluation, or else the last. An adapter (model.lora) is merged into
  the weights that it was trained on.
  --dtype NAME    float32, bfloat16 or float16; without it, as they were trained
  --adapter       write the adapter alone, for programs that load it beside its base model

  covey export outputs/2026-01-31/14-05-09 my-model --dtype bfloat16
"""


def main(argv: list[str]) -> int:
    words = parse(argv, switches=("--adapter",), values=("--dtype",))
    if words.help:
        print(USAGE)
        return 0
    if len(words.places) != 2 or words.settings:
        raise InputError(f"name a checkpoint or a run, and the folder to write\n\n{USAGE.rstrip()}")
    out = Path(words.places[1]).expanduser()
    folder = find_model(words.places[0])
    from covey.learner.export import check_export, export

    options = {"dtype": words.text("--dtype"), "adapter": words.on("--adapter")}
    check_export(folder, out, **options)  # type: ignore[arg-type]
    written = export(folder, out, **options)  # type: ignore[arg-type]
    print(f"{folder} → {out}\n  {written}")
    return 0


def find_model(name: str) -> Path:
    """The folder with the weights: a run's best checkpoint, the one that was named (its bytes checked), or a model."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise InputError(f"there is no folder {name}\n  name a run (outputs/DATE/TIME) or one of its checkpoints")
    if is_run(name) and path == run_of(path):
        return best_model(path)
    return named_model(path) if (path / "manifest.json").is_file() else path
