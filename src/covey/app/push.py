"""Writes a trained model with its card, and uploads it to the Hugging Face hub: covey push, trainer.push_to_hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from covey.app.model_card import CONFIG, model_card, modelfile, not_for_gguf, public_settings, settings_of
from covey.errors import InputError
from covey.telemetry.charts import draw_curve

TOKENS = "https://huggingface.co/settings/tokens"


def write_card(run: Path, folder: Path, repo: str, *, step: int, evaluations: Sequence[Path] = ()) -> None:
    """Add the card, the curve, the configuration and a Modelfile to a folder with the run's model."""
    (folder / "README.md").write_text(model_card(run, step, folder, repo, evaluations), encoding="utf-8")
    draw_curve(run, folder / "curve.png")
    config = yaml.safe_dump(public_settings(run), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(config, encoding="utf-8")
    if not_for_gguf(folder) is None:
        adapter = (folder / "adapter_config.json").is_file()
        (folder / "Modelfile").write_text(modelfile(settings_of(run), adapter), encoding="utf-8")


def check_evaluation(path: Path) -> Path:
    if not (path / "results.md").is_file():
        raise InputError(f"{path}: not a finished evaluation (no results.md)\n  fix: name a folder of covey eval")
    return path


def check_repo(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo}: not the name of a repository ({error})\n  fix: ORG/NAME or USER/NAME") from error


def upload(
    folder: Path, repo: str, *, private: bool | None = None, token: str | None = None, message: str | None = None
) -> str:
    """Create the repository if it does not exist, and upload the folder as one commit. Returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(token=token)
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=folder, commit_message=message or "Model trained with Covey"
        )
    except LocalTokenNotFoundError as error:
        raise _refused(repo, "no token of the hub is on this machine", LOGIN) from error
    except OfflineModeIsEnabled as error:
        raise _refused(repo, "HF_HUB_OFFLINE is set, or the hub did not answer", OTHER_MACHINE) from error
    except HfHubHTTPError as error:
        raise _refused(repo, *_explain(error, repo)) from error
    except Exception as error:
        if not isinstance(error, HfHubHTTPError.__bases__[0]):  # the base error of its HTTP library: httpx or httpx2
            raise
        raise _refused(repo, f"the hub cannot be reached ({error})", OTHER_MACHINE) from error
    return str(address)


LOGIN = f"hf auth login, or HF_TOKEN=..., with a token that may write: {TOKENS}"
OTHER_MACHINE = "covey push ... --dry-run FOLDER here, then on a machine with the hub: hf upload REPO FOLDER"


def _refused(repo: str, why: str, fix: str) -> InputError:
    return InputError(f"{repo} was not uploaded: {why}\n  fix: {fix}")


def _explain(error: Any, repo: str) -> tuple[str, str]:
    """What the hub's answer means, and what to do."""
    status = error.response.status_code
    said = error.server_message or f"status {status}"
    match status:
        case 401:
            return f"the hub does not accept the token ({said})", LOGIN
        case 403:
            return f"the token may not write there ({said})", f"a token with write access to {repo}: {TOKENS}"
        case 404:
            return f"the hub does not know it ({said})", "an organisation or user that exists, and that the token sees"
        case 409 | 412:
            return f"the repository changed meanwhile ({said})", "the same command again"
        case 413:
            return f"too large ({said})", "more storage on the hub, or --dtype bfloat16, or --adapter"
        case 429:
            return f"too many requests ({said})", "wait, then the same command again"
        case _ if status >= 500:
            return f"the hub has an error ({said})", "wait, then the same command again"
        case _:
            return f"the hub refused it ({said})", "see the message"
