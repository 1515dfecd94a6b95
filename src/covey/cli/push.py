"""covey push: a run's model with its card to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path

from covey.app.resume import find_model, is_run, run_of
from covey.cli.parse import parse
from covey.errors import InputError

USAGE = """\
covey push CHECKPOINT_OR_RUN ORG/NAME [--adapter] [--dtype bfloat16] [--private] [--eval FOLDER] [--dry-run FOLDER]

  Uploads a model to the Hugging Face hub, with a card: base model, data, reward, algorithm, settings, the learning
  curve, the evaluation with intervals, and the command that repeats the run; also the configuration and a Modelfile for
  Ollama. Of a run, the checkpoint with the best evaluation, or the last one. An adapter is merged into its base model.
  --adapter           upload the adapter alone
  --dtype NAME        float32, bfloat16 or float16; default: as trained
  --private           a new repository is private
  --eval FOLDER       include the table of a covey eval (outputs/eval/DATE_TIME)
  --message TEXT      the message of the commit
  --dry-run FOLDER    only write the files to a new folder, without a network

  covey push outputs/2026-01-31/14-05-09 me/my-model --dry-run my-model
"""


def main(argv: list[str]) -> int:
    values = ("--dtype", "--eval", "--message", "--dry-run")
    args = parse(argv, switches=("--adapter", "--private"), values=values)
    if len(args.positional) != 2 or args.settings:
        raise InputError(f"name a run or a checkpoint, and a repository\n\n{USAGE.rstrip()}")
    name, repo = args.positional
    if not is_run(name):
        what = (
            "is not a run or one of its checkpoints, from which the card is made"
            if Path(name).exists()
            else "is not here"
        )
        raise InputError(
            f"{name} {what}\n  fix: name a run's folder (covey runs lists them); other folders: hf upload REPO FOLDER"
        )
    from covey.app.push import check_evaluation, check_repo, upload, write_card
    from covey.learner.saving import check_export, export

    check_repo(repo)
    model, run = find_model(name), run_of(Path(name).expanduser())
    dry = args.value("--dry-run")
    evaluations = [check_evaluation(Path(path).expanduser())] if (path := args.value("--eval")) else []
    options = {"dtype": args.value("--dtype"), "adapter": args.has("--adapter")}
    with tempfile.TemporaryDirectory(prefix="covey-push-") as scratch:
        out = Path(dry).expanduser() if dry is not None else Path(scratch, "model")
        check_export(model, out, **options)  # type: ignore[arg-type]
        written = export(model, out, **options)  # type: ignore[arg-type]
        step = int(model.parent.name.rpartition("-")[2])
        write_card(run, out, repo, step=step, evaluations=evaluations)
        print(f"{model} → {dry or repo}\n  {written}")
        if dry is not None:
            for file in sorted(out.iterdir()):
                print(f"  {file.name}  {file.stat().st_size / 2**20:.2f} MiB")
            print(f"nothing was uploaded; to upload it:  hf upload {repo} {dry}")
            return 0
        print(upload(out, repo, private=args.has("--private") or None, message=args.value("--message")))
    return 0
