"""Tiers of isolation: which of them work on this machine, and how a sandboxed process is started in each.

Inside, only the host files that Python needs are visible, read-only (`view`). The modules of `inside/` are compiled
here and passed with the request in one sealed file in memory, so a sandbox needs no folder of Covey and compiles
nothing. The same interpreter marshals and reads the bytes, and a sandbox never sends any back.
"""

from __future__ import annotations

import fcntl
import functools
import json
import marshal
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from covey.errors import InputError, unknown
from covey.sandbox.inside.isolation import DEVICES, NOBODY, USER

SYSTEM = ("/usr", "/nix/store")
MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr on most systems
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    seconds: float = 10.0  # wall time from the start of the code, and CPU time of each process
    memory_mb: int = 512  # memory of all processes together, and address space of each
    output_bytes: int = 64 * 1024  # limit for stdout, and for stderr; a program that writes more is killed
    processes: int = 32  # processes and threads alive at once
    disk_mb: int = 64  # size of the private /tmp


# -- The host files that are visible inside --------------------------------------------------------------------------


class View(TypedDict):
    binds: list[str]
    links: list[tuple[str, str]]  # target, path
    hide: list[str]  # folders inside the binds that are covered


def interpreter() -> str:
    """The real executable: a virtual environment's link would look for site-packages that are not visible inside."""
    return os.path.realpath(sys.executable)


@functools.cache
def view(folders: tuple[str, ...] = ()) -> View:
    """`folders`: more folders to make readable, for packages."""
    paths = [*SYSTEM, *LOADER, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(interpreter()), *folders]
    links = [(os.readlink(path), path) for path in MERGED if os.path.islink(path)]
    paths += [path for path in MERGED if os.path.isdir(path) and not os.path.islink(path)]
    binds: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths if os.path.exists(path)}, key=len):
        if not any(_below(path, outer) for outer in binds):
            binds.append(path)
    return View(binds=binds, links=links, hide=_private(binds))


def _with_links(seen: View, links: Sequence[str]) -> View:
    """The same files, with these folders of the root as links into /tmp."""
    return View(
        binds=seen["binds"], links=[*seen["links"], *((f"/tmp{path}", path) for path in links)], hide=seen["hide"]
    )


def _private(binds: Sequence[str]) -> list[str]:
    """Folders with users' own files that lie within the binds, such as /usr/src/app in many containers."""
    needed = [os.path.realpath(path) for path in (sys.base_prefix, interpreter())]
    homes = [os.getcwd(), str(Path.home()), "/usr/src", "/usr/local/src"]
    found = {os.path.realpath(path) for path in homes if os.path.isdir(path)}
    inside = {path for path in found if any(_below(path, bind) for bind in binds)}
    return sorted(path for path in inside if not any(_below(wanted, path) for wanted in [*needed, *binds]))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# -- The modules of inside/ and a request, in one sealed file --------------------------------------------------------

MODULES = ("kernel", "keeper", "program", "values", "calls", "isolation")  # in the order of their imports

# Loads the modules from the file and calls isolation.start. bubblewrap runs it again, so it reads from offset 0.
BOOT = """
import marshal, os, sys, types
file, stage = int(sys.argv[1]), sys.argv[2]
modules, request = marshal.loads(os.pread(file, os.fstat(file).st_size, 0))
if stage != "down": os.close(file)
for name in ("covey", "covey.sandbox", "covey.sandbox.inside"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, code in modules:
    module = types.ModuleType("covey.sandbox.inside." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["covey.sandbox.inside"], name, module)
    exec(code, module.__dict__)
del file, name, code
module.start(stage, request)
"""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@functools.cache
def _modules() -> tuple[tuple[str, Any], ...]:
    folder = Path(__file__).parent / "inside"
    return tuple(
        (name, compile((folder / f"{name}.py").read_bytes(), f"<sandbox>/{name}.py", "exec", dont_inherit=True))
        for name in MODULES
    )


def packed(request: Mapping[str, Any]) -> int:
    """A descriptor of the sealed file; the caller closes it."""
    skipped = () if request["role"] in ("solution", "tests") else ("values", "calls")
    modules = tuple((name, code) for name, code in _modules() if name not in skipped)
    return sealed(marshal.dumps((modules, dict(request))))


def sealed(content: bytes) -> int:
    """A file in memory that can no longer be changed, positioned at its beginning."""
    file = os.memfd_create("covey", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    os.lseek(file, 0, os.SEEK_SET)
    return file


# -- Tiers, strongest first ------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FLAGS = ("-I", "-S", "-B", "-X", "utf8")
WRITABLE = ["/tmp", *(f"/dev/{device}" for device in DEVICES)]
PATIENCE = 30.0  # seconds for a sandbox to start


@dataclass(frozen=True)
class Tier:
    name: str
    promise: str
    weak: bool = False


BUBBLEWRAP = Tier(
    "bubblewrap", "no host files but the interpreter's, no network, no other processes; isolated by bwrap"
)
NAMESPACES = Tier(
    "namespaces", "no host files but the interpreter's, no network, no other processes; isolated by Covey"
)
LIMITS = Tier("limits", "time, memory and output only; files, network and processes as far as filters reach", weak=True)
TIERS = {tier.name: tier for tier in (BUBBLEWRAP, NAMESPACES, LIMITS)}


@dataclass(frozen=True)
class Finding:
    """One tier on this machine, for `covey doctor`."""

    tier: Tier
    works: bool
    detail: str  # the filters it has here, or why it does not work
    fix: str = ""


# -- Starting a process ----------------------------------------------------------------------------------------------


def launch(
    tier: Tier,
    limits: Limits,
    request: Mapping[str, Any],
    *,
    control: int,
    folder: str = "/tmp",
    folders: Sequence[str] = (),
    links: Sequence[str] = (),
    filters: bool = True,
) -> tuple[tuple[str, ...], int]:
    """A command, and the descriptor of the request it reads, to be closed once the process runs.

    `control`: the descriptor for the sandbox's reports. `folder`: the working folder (on the host, for `limits`)."""
    seen = _with_links(view(tuple(folders)), links)
    isolated = tier.name != "limits"
    full = {
        "files": {},
        "cpu_seconds": None,
        **request,
        "control": control,
        "folder": folder,
        "folders": list(folders),
        "view": dict(seen),
        "filters": filters,
        "readable": ["/"] if isolated else [*seen["binds"], *(path for _, path in seen["links"]), "/proc"],
        "writable": WRITABLE if isolated else [folder, *WRITABLE[1:]],
        "bubblewrap": None,
    }
    # The user's process count includes process 1 and its parents and, without isolation, the host's processes.
    others = 4 if isolated else _processes_of_user()
    full["limits"] = {**asdict(limits), "cpu_seconds": full.pop("cpu_seconds"), "others": others}
    python = (interpreter(), *FLAGS, "-c", BOOT)
    if tier.name != "bubblewrap":
        file = packed(full)
        return (*python, str(file), "namespace" if isolated else "limits"), file
    bwrap = _bubblewrap(limits, seen)
    if os.geteuid() != 0:
        file = packed(full)
        return (*bwrap, *python, str(file), "inside"), file
    # The request contains the command, and the command the number of the request's descriptor: reserve that first.
    reserved = os.open("/dev/null", os.O_RDONLY)
    full["bubblewrap"] = [*bwrap, *python, str(reserved), "inside"]
    file = packed(full)
    os.dup2(file, reserved, inheritable=False)
    os.close(file)
    return (*python, str(reserved), "down"), reserved


def _bubblewrap(limits: Limits, seen: View) -> tuple[str, ...]:
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("no executable bwrap on the PATH")
    words = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--disable-userns"]
    words += ["--perms", "0700", "--size", str(limits.disk_mb * 2**20), "--tmpfs", "/tmp"]
    for path in seen["binds"]:
        words += ["--ro-bind", path, path]
    for target, path in seen["links"]:
        words += ["--symlink", target, path]
    for path in seen["hide"]:
        words += ["--tmpfs", path, "--remount-ro", path]
    words += ["--tmpfs", "/dev"]
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"]
    return (*words, "--proc", "/proc", "--remount-ro", "/", "--chdir", "/tmp", "--")


def _processes_of_user() -> int:
    user = os.geteuid() or NOBODY
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count


# -- Choosing a tier -------------------------------------------------------------------------------------------------


def choose(tier: str = "auto", allow_weak: bool = False) -> Tier:
    """The strongest tier that works here, or the requested one. InputError, with the fix, if there is none."""
    if tier != "auto" and tier not in TIERS:
        raise unknown("value of sandbox.tier", tier, ["auto", *TIERS])
    candidates = list(TIERS.values()) if tier == "auto" else [TIERS[tier]]
    reasons = []
    for candidate in candidates:
        if candidate.weak and not allow_weak:
            reasons.append(f"  {candidate.name:11} refused: it does not isolate")
        elif (found := examine(candidate)).works:
            return candidate
        else:
            reasons.append(
                f"  {candidate.name:11} {found.detail}" + (f"\n{'':14}fix: {found.fix}" if found.fix else "")
            )
    head = "no sandbox for code that a model writes" if tier == "auto" else f"sandbox.tier={tier} does not work here"
    last = "" if allow_weak else "\n  or, on a machine where nothing can be lost: sandbox.allow_weak=true"
    raise InputError("\n".join([head, *reasons]) + last)


def describe() -> list[Finding]:
    """Every tier, strongest first: whether it works here, and which filters it has."""
    return [examine(tier) for tier in TIERS.values()]


@functools.cache
def examine(tier: Tier) -> Finding:
    if not sys.platform.startswith("linux"):
        return Finding(tier, False, f"needs Linux, this is {sys.platform}", "run agents that write code on Linux")
    if tier is BUBBLEWRAP and shutil.which("bwrap") is None:
        return Finding(tier, False, "bwrap is not installed", "apt-get install bubblewrap")
    try:
        found = _try(tier)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(tier, False, str(error), _fix(tier))
    has = [name for name, there in found.items() if there]
    return Finding(tier, True, tier.promise + (f"; with {' and '.join(has)}" if has else "; no filters on this kernel"))


def _fix(tier: Tier) -> str:
    if tier is LIMITS:
        return "install Python where every user can read it"
    return "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0)" + (
        "; bubblewrap 0.8 or newer" if tier is BUBBLEWRAP else "; Linux 5.12 or newer"
    )


def _try(tier: Tier) -> dict[str, bool]:
    """Run a small program in the tier and return the filters it had; OSError with the reason if it did not run."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # noqa: S103 - root runs this as nobody, in a folder with a random name
        where = folder if tier is LIMITS else "/tmp"
        request = {"role": "program", "code": "print(6 * 7)"}
        command, request_file = launch(tier, Limits(), request, control=writer, folder=where)
        try:
            done = subprocess.run(
                command,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(request_file, writer),
                start_new_session=True,
                timeout=PATIENCE,
            )
            os.close(writer)
            reports = (
                b"".join(iter(lambda: os.read(reader, 4096), b"")) if select.select([reader], [], [], 0)[0] else b""
            )
        finally:
            os.close(request_file)
            os.close(reader)
    messages = [json.loads(line) for line in reports.splitlines()]
    errors = [message["error"] for message in messages if "error" in message]
    if errors or done.stdout != b"42\n":
        raise OSError("; ".join(errors) or done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}")
    return dict(messages[0]["ready"])
