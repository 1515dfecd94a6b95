"""Walls of our own making: namespaces, and a root folder that holds only what Python needs.

Everything here works for an ordinary user: a user namespace gives the right to mount, in a world of its own. Root
first becomes an ordinary user (`step_down`), so that there is one way for both and no power of root's inside.

The root folder is a small read-only tmpfs; what the view names is bound into it, read-only, without devices or
setuid programs. The old root is unmounted before any code of the model's runs.
"""

from __future__ import annotations

import ctypes
import os

from covey.sandbox.inside import kernel

TYPE_CHECKING = False  # see start.py
if TYPE_CHECKING:
    from typing import Any

NOBODY = 65534
USER = 1000  # how the ordinary user is called inside
DEVICES = ("null", "zero", "full", "random", "urandom")
READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


def step_down(view: dict[str, Any]) -> None:
    """From root to nobody. What nobody could not reach (an interpreter under /root) is first bound where it can be
    reached, in a mount namespace of this process's own."""
    hidden = [path for path in view["binds"] if closed_folder(path)]
    if hidden:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        opened = {path: os.open(path, os.O_PATH) for path in hidden}
        for path, source in opened.items():
            while closed := closed_folder(path):  # what else lies in that folder is out of sight from here on
                kernel.mount("tmpfs", closed, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
            if not os.path.exists(path):
                os.makedirs(path)
            kernel.mount(f"/proc/self/fd/{source}", path, None, kernel.MS_BIND | kernel.MS_REC)
            os.close(source)
    kernel.bar_capabilities()  # only root may
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would still be root's
    os.chdir("/")


def closed_folder(path: str) -> str | None:
    """The first folder on the way to `path` that nobody may not pass."""
    parts = os.path.dirname(os.path.abspath(path)).split("/")
    for depth in range(2, len(parts) + 1):
        folder = "/".join(parts[:depth])
        if os.path.isdir(folder) and not os.stat(folder).st_mode & 0o001:
            return folder
    return None


def die_with_parent() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)


def build(view: dict[str, Any], disk_mb: int) -> None:
    """Returns in process 1 of the new namespaces, within its new root. The first process stays outside, waits, and
    ends as that one ends."""
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
    # The new root grows inside a tmpfs that is itself made the root, so that it covers nothing that is to be bound.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    os.mkdir("/new/tmp")
    room = f"mode=700,size={disk_mb}m,nr_inodes={1024 + 64 * disk_mb}"
    kernel.mount("tmpfs", "/new/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, room)
    for path in view["binds"]:
        _bind(f"/old{path}", f"/new{path}", READ_ONLY)
    for target, path in view["links"]:
        os.symlink(target, f"/new{path}")
    for path in view["hide"]:
        kernel.mount("tmpfs", f"/new{path}", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4k")
        kernel.mount_attributes(f"/new{path}", READ_ONLY)
    _devices_and_processes()
    os.chdir("/new")
    kernel.pivot_root(".", ".")  # the old root now lies over the new one, and comes off
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount_attributes("/", READ_ONLY, below=False)


def _devices_and_processes() -> None:
    os.mkdir("/new/dev")
    for device in DEVICES:
        _bind(f"/old/dev/{device}", f"/new/dev/{device}", kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    os.symlink("/proc/self/fd", "/new/dev/fd")
    os.symlink("/tmp", "/new/dev/shm")  # one place to write, one limit
    os.mkdir("/new/proc")
    kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _write("/new/proc/sys/user/max_user_namespaces", "0")  # no world within this world
    kernel.mount_attributes("/new/proc", kernel.MOUNT_ATTR_RDONLY)


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
