"""covey: the command line. Each command parses its arguments, calls the application layer and prints results."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from covey.errors import InputError, RunFailed, describe_error, unknown
from covey.redact import RedactedStream, hide

USAGE = """\
covey — reinforcement learning of language models on groups of sampled answers

  covey train   [--config-name RECIPE | --config FILE] [key=value ...]    train
  covey sft     [--config FILE] [key=value ...]                           imitate demonstrations, before training
  covey eval    MODEL_OR_RUN... [--tasks A,B] [--n 16] [key=value ...]     score models on held-out tasks, compare
  covey sample  MODEL_OR_RUN [--question TEXT] [-n 4] [key=value ...]     read what a model answers
  covey serve   MODEL_OR_RUN [key=value ...]                              an OpenAI-compatible endpoint that records
  covey export  CHECKPOINT_OR_RUN OUT [--dtype bfloat16] [--adapter]      an ordinary model folder for other programs
  covey push    CHECKPOINT_OR_RUN ORG/NAME [--dry-run FOLDER]             to the Hugging Face hub, with a model card
  covey data    prepare NAME | show NAME_OR_FILE | check FILE             public data sets, and files of your own
  covey config  [explain KEY] [key=value ...]                             resolved settings; what a setting means
  covey simulate RECIPE_OR_RUN --gpus 512 [--gpu h200] [key=value ...]    step time and memory, before renting
  covey slurm   RECIPE --nodes 2 --gpus-per-node 8 [key=value ...]        a job script for a Slurm cluster
  covey algorithms                                                        the algorithms and their settings
  covey dash    [RUNS...]                                                 a page over runs, live, on this machine
  covey report  RUN... [--markdown]                                       that page as one file, or Markdown
  covey runs    [FOLDER...] | tag RUN TAG...                              runs: status, best score, tags; label a run
  covey watch   RUN                                                       follow a run in progress
  covey doctor                                                            what this machine can do, and the fixes

Start with:  covey train --config-name demo        More:  covey COMMAND --help
"""
HELP = ("--help", "-h")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in (*HELP, "help"):
        print(USAGE)
        return 0
    if words[0] == "--version":
        from covey import __version__

        print(f"covey {__version__}")
        return 0
    with _redacted_output():
        return _run(words)


@contextmanager
def _redacted_output() -> Iterator[None]:
    """Hide secrets in the output and in tracebacks of uncaught errors."""
    sys.excepthook = _print_traceback
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and RedactedStream(stream) for stream in before)  # None if closed
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(hide("".join(traceback.format_exception(kind, error, trace))))


def _run(words: list[str]) -> int:
    try:
        _read_env_file()
        return _command(words[0], words[1:])
    except InputError as error:
        print(hide(f"{error}\nnothing was started"), file=sys.stderr)
        return 2
    except RunFailed as error:
        print(hide("\n" + "\n".join([str(error), *getattr(error, "__notes__", ())])), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except SystemExit as error:  # raised by the user's code in an asyncio task, which ends the event loop
        print(
            hide(f"\n{describe_error(error)}\n  this ended the command; return, or raise an exception"), file=sys.stderr
        )
        return 1
    except BrokenPipeError:  # the reader of our output was closed
        return 0
    except Exception as error:
        if _was_interrupted(error):
            print("\ninterrupted", file=sys.stderr)
            return 130
        if (message := _storage_message(error)) is None:
            raise
        print(f"\n{message}", file=sys.stderr)
        return 1


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an error was caused by Ctrl-C: libraries may raise errors of their own when they are interrupted."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _storage_message(error: Exception) -> str | None:
    """The message about a full, read-only or broken disk; None for any other error."""
    from covey.storage import describe_failure, storage_errno

    if (number := storage_errno(error)) is None:
        return None
    place = error.filename if isinstance(error, OSError) and error.filename is not None else "a file"
    return describe_failure(Path(str(place)), number)


def _read_env_file() -> None:
    """Read .env before modules that read its variables only once are imported, such as huggingface_hub (HF_HOME)."""
    from covey.config.read import export, read_env_file

    export(read_env_file(Path(".env")))


# Command → module, function and usage. The module is imported when the command runs: together they import all of Covey.
COMMANDS = {
    "train": "covey.cli.train:main:USAGE",
    "sft": "covey.cli.train:main_sft:SFT_USAGE",
    "eval": "covey.cli.evaluate:main:USAGE",
    "sample": "covey.cli.sample:main:USAGE",
    "serve": "covey.cli.serve:main:USAGE",
    "export": "covey.cli.runs:main:USAGE",
    "push": "covey.cli.push:main:USAGE",
    "data": "covey.cli.data:main:USAGE",
    "config": "covey.cli.settings:main_config:CONFIG_USAGE",
    "simulate": "covey.cli.simulate:main:USAGE",
    "slurm": "covey.cli.slurm:main:USAGE",
    "algorithms": "covey.cli.settings:main_algorithms:ALGORITHMS_USAGE",
    "dash": "covey.cli.runs:main_dash:DASH",
    "report": "covey.cli.runs:main_report:REPORT",
    "runs": "covey.cli.runs:main_runs:RUNS",
    "watch": "covey.cli.runs:main_watch:WATCH",
    "doctor": "covey.cli.doctor:main:__doc__",
}


def _command(name: str, argv: list[str]) -> int:
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS, prefix="covey ")
    module, function, usage = COMMANDS[name].split(":")
    found = importlib.import_module(module)
    if any(word in HELP for word in argv):
        print(getattr(found, usage))
        return 0
    code: int = getattr(found, function)(argv)
    return code


if __name__ == "__main__":
    sys.exit(main())
