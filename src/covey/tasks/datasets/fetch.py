"""The raw files of a data set: local ones, or downloads from the hub or a repository."""

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

TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class RawFile:
    source: Source
    path: Path
    origin: str  # for the manifest: the file name, the address, or the hub with its commit


# -- Downloads ---------------------------------------------------------------------------------------------------------


def download_files(dataset: Dataset, folder: Path, revision: str | None = None) -> list[RawFile]:
    """All files of the set from their public homes; downloads go to `folder`."""
    sources = (source for source in dataset.sources if source.home is not None)
    return [file for source in sources for file in fetch(dataset.name, source, folder, revision)]


def fetch(name: str, source: Source, folder: Path, revision: str | None = None) -> list[RawFile]:
    """The files of one source. `revision`: a branch, a tag or a commit of the hub; default: the current one."""
    assert source.home is not None
    if isinstance(source.home, Hub):
        return _from_hub(name, source, source.home, revision)
    if revision is not None:
        raise InputError(f"--revision is for sets of the hub; {name} is from {source.home}")
    return [RawFile(source, _download(name, source, source.home, folder), str(source.home))]


def _download(name: str, source: Source, home: Url, folder: Path) -> Path:
    # The last two parts of the address keep files of the same name apart.
    path = folder.joinpath(*Path(urlparse(home.address).path).parts[-2:])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            urllib.request.urlopen(home.address, timeout=TIMEOUT) as response,  # noqa: S310 - an address of this package
            path.open("wb") as file,
        ):
            shutil.copyfileobj(response, file)
            expected, size = response.headers.get("Content-Length", ""), file.tell()
    except urllib.error.HTTPError as error:
        raise _unreachable(name, source, f"the server says {error.code} {error.reason}") from error
    except OSError as error:  # no network, no such host, a broken connection
        if storage_errno(error) is not None:
            raise StorageFailed(describe_failure(path, storage_errno(error) or 0)) from error
        raise _unreachable(name, source, str(getattr(error, "reason", error))) from error
    if expected.isdigit() and size < int(expected):
        raise _unreachable(name, source, f"the connection ended after {size} of {expected} bytes")
    return path


def _from_hub(name: str, source: Source, home: Hub, revision: str | None) -> list[RawFile]:
    """All files from one commit, so that an update of the set cannot mix versions."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        commit = HfApi().dataset_info(home.repo, revision=revision).sha
        names = HfApi().list_repo_files(home.repo, repo_type="dataset", revision=commit)
        matching = sorted(file for file in names if fnmatch(file, home.pattern))
        paths = [Path(hf_hub_download(home.repo, file, repo_type="dataset", revision=commit)) for file in matching]
    except Exception as error:  # the hub's own errors, or those of its HTTP library
        raise _unreachable(name, source, str(error).splitlines()[0] or type(error).__name__) from error
    if not paths:
        raise InputError(f"{home}: no file of that name there\n{_by_hand(name, source)}")
    return [RawFile(source, path, f"{home} @ {commit}") for path in paths]


def _unreachable(name: str, source: Source, why: str) -> Absent:
    return Absent(f"{source.home} cannot be reached: {why}\n{_by_hand(name, source)}")


def _by_hand(name: str, source: Source) -> str:
    return (
        f"  fix: get the file on a machine that reaches it, then\n"
        f"       covey data prepare {name} --from {source.split}=FILE     (and the other files of the set, if any)"
    )


# -- Local files -------------------------------------------------------------------------------------------------------


def local_files(dataset: Dataset, words: Sequence[str]) -> list[RawFile]:
    """The values of --from: files, patterns or folders. `train=FILE` gives the kind of a file with another name."""
    files: list[RawFile] = []
    for word in words:
        split, separator, place = word.partition("=")
        if separator and not Path(word).exists():
            source = next((one for one in dataset.sources if one.split == split), None)
            if source is None:
                kinds = ", ".join(dict.fromkeys(one.split for one in dataset.sources))
                raise InputError(f"--from {word}: {dataset.name} has files for {kinds}, not for {split}")
            files += [RawFile(source, path, path.name) for path in find_files("--from", place)]
        elif Path(word).expanduser().is_dir():
            files += _in_folder(dataset, Path(word).expanduser())
        else:
            files += [_by_name(dataset, path) for path in find_files("--from", word)]
    if not any(file.source.split in dataset.rows for file in files):  # one split is enough
        raise InputError(f"no questions of {dataset.name} among the files given\n{_expected_names(dataset)}")
    return files


def _in_folder(dataset: Dataset, folder: Path) -> list[RawFile]:
    """The files of a folder that belong to the set; there may be others."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [RawFile(source, path, path.name) for path in paths if (source := _source_of(dataset, path)) is not None]
    if not files:
        raise InputError(f"--from {folder}: no file of {dataset.name} in this folder\n{_expected_names(dataset)}")
    return files


def _by_name(dataset: Dataset, path: Path) -> RawFile:
    required = [source for source in dataset.sources if not source.optional]
    source = _source_of(dataset, path) or (required[0] if len(required) == 1 else None)
    if source is None:
        raise InputError(f"--from {path}: which file of {dataset.name} is this?\n{_expected_names(dataset)}")
    return RawFile(source, path, path.name)


def _source_of(dataset: Dataset, path: Path) -> Source | None:
    """The source whose pattern matches. Patterns with a folder (possible_answer/…) are more specific and come first."""
    patterns = [(pattern, source) for source in dataset.sources for pattern in source.local]
    patterns.sort(key=lambda one: "/" not in one[0])
    for pattern, source in patterns:
        if fnmatch(f"{path.parent.name}/{path.name}" if "/" in pattern else path.name, pattern):
            return source
    return None


def _expected_names(dataset: Dataset) -> str:
    lines = [f"  {source.split}: {' or '.join(source.local)}" for source in dataset.sources[:6]]
    if len(dataset.sources) > 6:
        lines.append(f"  and {len(dataset.sources) - 6} more")
    hint = f"  or say what it is: --from {dataset.sources[-1].split}=FILE"
    return "\n".join(["  its files are called", *lines, hint])
