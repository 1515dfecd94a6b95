"""Raw files from their public homes: the hub, or a repository's address."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlparse

from covey.errors import Absent, InputError
from covey.storage import StorageFailed, explain, refusal
from covey.tasks.datasets.dataset import Hub, Source, Url

SECONDS = 60  # without a byte, and a server is given up


@dataclass(frozen=True)
class Fetched:
    path: Path
    origin: str  # its home; of the hub with the commit, so that the same can be had again


def fetch(name: str, source: Source, folder: Path, revision: str | None = None) -> list[Fetched]:
    """`revision`: a branch, a tag or a commit of the hub; without it what is current."""
    assert source.home is not None
    if isinstance(source.home, Url):
        if revision is not None:
            raise InputError(f"--revision is for sets of the hub; {name} is from {source.home}")
        return [Fetched(_download(name, source, source.home, folder), str(source.home))]
    return _from_hub(name, source, source.home, revision)


def _download(name: str, source: Source, home: Url, folder: Path) -> Path:
    # The last two parts of the address, so that two files of one name do not meet.
    path = folder.joinpath(*Path(urlparse(home.address).path).parts[-2:])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (  # the addresses are ours, of this package
            urllib.request.urlopen(home.address, timeout=SECONDS) as answer,  # noqa: S310
            path.open("wb") as file,
        ):
            shutil.copyfileobj(answer, file)
            promised, there = answer.headers.get("Content-Length", ""), file.tell()
    except urllib.error.HTTPError as error:
        raise _not_reached(name, source, f"the server says {error.code} {error.reason}") from error
    except OSError as error:  # no network, no such host, a broken connection
        if refusal(error) is not None:
            raise StorageFailed(explain(path, refusal(error) or 0)) from error
        raise _not_reached(name, source, str(getattr(error, "reason", error))) from error
    if promised.isdigit() and there < int(promised):
        raise _not_reached(name, source, f"the connection ended after {there} of {promised} bytes")
    return path


def _from_hub(name: str, source: Source, home: Hub, revision: str | None) -> list[Fetched]:
    """All files of one commit: the set may change while we fetch them."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        commit = HfApi().dataset_info(home.repo, revision=revision).sha
        there = HfApi().list_repo_files(home.repo, repo_type="dataset", revision=commit)
        wanted = sorted(file for file in there if fnmatch(file, home.pattern))
        paths = [Path(hf_hub_download(home.repo, file, repo_type="dataset", revision=commit)) for file in wanted]
    except Exception as error:  # the hub's own errors, or those of the library that it speaks HTTP with
        raise _not_reached(name, source, str(error).splitlines()[0] or type(error).__name__) from error
    if not paths:
        raise InputError(f"{home}: no file of that name there\n{_by_hand(name, source)}")
    return [Fetched(path, f"{home} @ {commit}") for path in paths]


def _not_reached(name: str, source: Source, why: str) -> Absent:
    return Absent(f"{source.home} cannot be reached: {why}\n{_by_hand(name, source)}")


def _by_hand(name: str, source: Source) -> str:
    return (
        f"  fix: get the file on a machine that reaches it, then\n"
        f"       covey data prepare {name} --from {source.split}=FILE     (and the other files of the set, if any)"
    )
