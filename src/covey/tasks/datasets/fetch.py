"""Raw files from their public homes: the hub, or a repository's address."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlparse

from covey.errors import Absent, InputError
from covey.storage import StorageFailed, describe_failure, storage_errno
from covey.tasks.datasets.dataset import Dataset, Hub, Source, Url
from covey.tasks.files import find_files

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
        if storage_errno(error) is not None:
            raise StorageFailed(describe_failure(path, storage_errno(error) or 0)) from error
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


# -- Which raw file is which source of a set: among the files given, or else from its public home ----------------------


@dataclass(frozen=True)
class Raw:
    source: Source
    path: Path
    origin: str  # what the manifest says of where it is from


def given_files(dataset: Dataset, words: Sequence[str]) -> list[Raw]:
    """Files, patterns or folders; `train=FILE` says what a file is where its name does not."""
    found: list[Raw] = []
    for word in words:
        split, named, place = word.partition("=")
        if named and not Path(word).exists():
            source = next((one for one in dataset.sources if one.split == split), None)
            if source is None:
                kinds = ", ".join(dict.fromkeys(one.split for one in dataset.sources))
                raise InputError(f"--from {word}: {dataset.name} has files for {kinds}, not for {split}")
            found += [Raw(source, path, path.name) for path in find_files("--from", place)]
        elif Path(word).expanduser().is_dir():
            found += _in_folder(dataset, Path(word).expanduser())
        else:
            found += [_named(dataset, path) for path in find_files("--from", word)]
    _check_complete(dataset, found)
    return found


def _in_folder(dataset: Dataset, folder: Path) -> list[Raw]:
    """Those of a folder that belong to the set; others may lie there too."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    matched = [Raw(source, path, path.name) for path in files if (source := _source_of(dataset, path)) is not None]
    if not matched:
        raise InputError(f"--from {folder}: no file of {dataset.name} in this folder\n{_wanted(dataset)}")
    return matched


def _named(dataset: Dataset, path: Path) -> Raw:
    needed = [source for source in dataset.sources if not source.optional]
    source = _source_of(dataset, path) or (needed[0] if len(needed) == 1 else None)
    if source is None:
        raise InputError(f"--from {path}: which file of {dataset.name} is this?\n{_wanted(dataset)}")
    return Raw(source, path, path.name)


def _source_of(dataset: Dataset, path: Path) -> Source | None:
    """Names with a folder in front (possible_answer/…) are looked for first: they say more."""
    ending = f"{path.parent.name}/{path.name}"
    patterns = [(pattern, source) for source in dataset.sources for pattern in source.local]
    patterns.sort(key=lambda one: "/" not in one[0])
    for pattern, source in patterns:
        if fnmatch(ending if "/" in pattern else path.name, pattern):
            return source
    return None


def _check_complete(dataset: Dataset, found: Sequence[Raw]) -> None:
    """At least one of the splits: someone may have a part of a set, and want no more."""
    if not any(raw.source.split in dataset.rows for raw in found):
        raise InputError(f"no questions of {dataset.name} among the files given\n{_wanted(dataset)}")


def _wanted(dataset: Dataset) -> str:
    lines = [f"  {source.split}: {' or '.join(source.local)}" for source in dataset.sources[:6]]
    if len(dataset.sources) > 6:
        lines.append(f"  and {len(dataset.sources) - 6} more")
    say = f"  or say what it is: --from {dataset.sources[-1].split}=FILE"
    return "\n".join(["  its files are called", *lines, say])


def home_files(dataset: Dataset, folder: Path, revision: str | None = None) -> list[Raw]:
    """All of the set from its public home; `folder` takes what is downloaded."""
    found: list[Raw] = []
    for source in dataset.sources:
        if source.home is not None:
            fetched = fetch(dataset.name, source, folder, revision)
            found += [Raw(source, one.path, one.origin) for one in fetched]
    return found
