"""The first process of a sandbox: sets up isolation, limits and filters, and then runs the program.

`stage` says where the process is:

down       root outside bubblewrap: becomes the user `nobody` and executes bwrap
namespace  the tier `namespaces`: builds namespaces and a root folder, then continues as `inside`
inside     in bubblewrap's namespaces
limits     no namespaces, only limits

In every tier a keeper follows, and under it the program with limits, no privileges, Landlock and seccomp.

The tier `namespaces` works for an ordinary user: a user namespace gives the right to mount within it. Root first
becomes an ordinary user (`step_down`), so both take the same path and nothing inside has root's rights. The root folder
is a small read-only tmpfs; the paths of the view are bound into it, read-only, without devices or setuid programs. The
old root is unmounted before any code of the model runs.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not signal, which imports enum
import ctypes
import os
import resource

from covey.sandbox.inside import keeper, kernel

# Every program waits for these imports, so the modules that all sandboxes need import as little as possible.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OPEN_FILES = 256
NOBODY = 65534
USER = 1000  # the uid inside
DEVICES = ("null", "zero", "full", "random", "urandom")
READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


def start(stage: str, request: dict[str, Any]) -> None:
    """Returns in the program's process, when the program may exit."""
    try:
        if stage == "down":
            step_down(request["view"])
            die_with_parent()
            os.execv(request["bubblewrap"][0], request["bubblewrap"])
        if os.getuid() == 0:
            step_down(request["view"])
        die_with_parent()
        if stage == "namespace":
            enter_namespaces(request["view"], request["limits"]["disk_mb"])
        os.chdir(request["folder"])
        cells = keeper.Cells(request) if request["role"] == "session" else None
        keeper.keep(
            lambda: _harden(request, cells),
            memory_mb=request["limits"]["memory_mb"],
            control=request["control"],
            isolated=stage != "limits",
            cells=cells,
        )
    except Exception as error:  # reported to the host; no code of the model has run yet
        import json

        report(request, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    if cells is not None:
        request["codes"] = cells.codes
    _run(request)


def report(request: dict[str, Any], message: str) -> None:
    os.write(request["control"], message.encode() + b"\n")


def _harden(request: dict[str, Any], cells: keeper.Cells | None) -> None:
    if cells is not None:
        cells.enter()
    die_with_parent()
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # ignored if Covey runs in the background
    _limit(request["limits"])
    kernel.leave_keyrings()
    kernel.drop_capabilities()
    landlock = seccomp = False
    if request["filters"]:
        landlock = kernel.landlock(request["readable"], request["writable"])
        seccomp = kernel.seccomp()
    report(request, f'{{"ready": {{"landlock": {int(landlock)}, "seccomp": {int(seccomp)}}}}}')


def _limit(limits: dict[str, Any]) -> None:
    def limit(which: int, value: int, more: int = 0) -> None:
        _, hard = resource.getrlimit(which)
        soft, most = (n if hard == resource.RLIM_INFINITY else min(n, hard) for n in (value, value + more))
        resource.setrlimit(which, (soft, most))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, limits["memory_mb"] * 2**20)
    limit(resource.RLIMIT_FSIZE, limits["disk_mb"] * 2**20)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_MEMLOCK, 0)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    limit(resource.RLIMIT_NPROC, limits["processes"] + limits["others"])
    if limits["cpu_seconds"] is not None:
        # The hard limit is one second later. At the soft limit the kernel sends SIGXCPU, which gives the reason; at the
        # hard limit, SIGKILL.
        limit(resource.RLIMIT_CPU, int(limits["cpu_seconds"]) + 2, more=1)


def _run(request: dict[str, Any]) -> None:
    role = request["role"]
    if role in ("program", "session"):
        from covey.sandbox.inside import program

        (program.run if role == "program" else program.session)(request)
    else:
        from covey.sandbox.inside import calls

        {"solution": calls.serve, "tests": calls.run_tests}[role](request)


# -- Namespaces and the sandbox's root folder ------------------------------------------------------------------------


def step_down(view: dict[str, Any]) -> None:
    """Change from root to the user `nobody`. Paths that this user cannot access (an interpreter under /root) are first
    bind-mounted at an accessible place, in a private mount namespace."""
    hidden = [path for path in view["binds"] if closed_folder(path)]
    if hidden:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        opened = {path: os.open(path, os.O_PATH) for path in hidden}
        for path, source in opened.items():
            while closed := closed_folder(path):  # covers everything else in that folder
                kernel.mount("tmpfs", closed, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
            if not os.path.exists(path):
                os.makedirs(path)
            kernel.mount(f"/proc/self/fd/{source}", path, None, kernel.MS_BIND | kernel.MS_REC)
            os.close(source)
    kernel.bar_capabilities()  # needs root
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise /proc/self would still belong to root
    os.chdir("/")


def closed_folder(path: str) -> str | None:
    """The topmost folder above `path` that the user `nobody` may not enter."""
    parts = os.path.dirname(os.path.abspath(path)).split("/")
    for depth in range(2, len(parts) + 1):
        folder = "/".join(parts[:depth])
        if os.path.isdir(folder) and not os.stat(folder).st_mode & 0o001:
            return folder
    return None


def die_with_parent() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)


def enter_namespaces(view: dict[str, Any], disk_mb: int) -> None:
    """Returns in process 1 of the new namespaces, within its new root. The first process stays outside, waits, and
    exits with the same code."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
    )
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{USER} {uid} 1")
    _write("/proc/self/gid_map", f"{USER} {gid} 1")
    first = os.fork()
    if first:
        kernel.drop_capabilities()
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    die_with_parent()
    kernel.checked("sethostname", kernel.libc.sethostname(b"sandbox", ctypes.c_size_t(7)))
    _new_root(view, disk_mb)


def _new_root(view: dict[str, Any], disk_mb: int) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # The new root is built in a tmpfs that first becomes the root itself, so that it covers nothing yet to be bound.
    _tmpfs("/tmp", "mode=755,size=4m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    _tmpfs("/new", "mode=755,size=4m")
    os.mkdir("/new/tmp")
    _tmpfs("/new/tmp", f"mode=700,size={disk_mb}m,nr_inodes={1024 + 64 * disk_mb}")
    for path in view["binds"]:
        _bind(f"/old{path}", f"/new{path}", READ_ONLY)
    for target, path in view["links"]:
        os.symlink(target, f"/new{path}")
    for path in view["hide"]:
        _tmpfs(f"/new{path}", "mode=755,size=4k")
        kernel.mount_attributes(f"/new{path}", READ_ONLY)
    os.mkdir("/new/dev")
    for device in DEVICES:
        _bind(f"/old/dev/{device}", f"/new/dev/{device}", kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    os.symlink("/proc/self/fd", "/new/dev/fd")
    os.symlink("/tmp", "/new/dev/shm")  # one writable folder with one limit
    os.mkdir("/new/proc")
    kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _write("/new/proc/sys/user/max_user_namespaces", "0")  # no nested namespaces
    kernel.mount_attributes("/new/proc", kernel.MOUNT_ATTR_RDONLY)
    os.chdir("/new")
    kernel.pivot_root(".", ".")  # stacks the old root on top of the new one; unmounting removes it
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount_attributes("/", READ_ONLY, recursive=False)


def _tmpfs(target: str, options: str) -> None:
    kernel.mount("tmpfs", target, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.bind(source, target, attributes)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    os.write(file, text.encode())
    os.close(file)
