"""System calls that Python has no names for, through ctypes. Every failure is an OSError that names the call."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x80, 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4

# The numbers of these calls are the same on every architecture: they came after the tables were joined.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1


def machine() -> str:
    return os.uname().machine


def checked(call: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(call: str, number: int, *arguments: object) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(call, libc.syscall(ctypes.c_long(number), *words))


def unshare(flags: int) -> None:
    checked("unshare", libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    checked(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), data))


def unmount(target: str) -> None:
    checked(f"umount {target}", libc.umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    number = SYS_PIVOT_ROOT.get(machine())
    if number is None:
        raise OSError(f"pivot_root: its number on {machine()} is not known here")
    syscall("pivot_root", number, os.fsencode(new), os.fsencode(old))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def mount_attributes(path: str, attributes: int, *, below: bool = True) -> None:
    """Set attributes on a mount, and on all that is mounted below it."""
    wanted = _MountAttributes(attributes, 0, 0, 0)
    size = ctypes.sizeof(wanted)
    where = os.fsencode(path)
    syscall(
        f"mount_setattr {path}",
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        where,
        AT_RECURSIVE if below else 0,
        ctypes.byref(wanted),
        size,
    )


def bind(source: str, target: str, attributes: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    mount_attributes(target, attributes)


def prctl(option: int, value: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    checked(f"prctl {option}", libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def bar_capabilities() -> None:
    """Those that this process does not have, no program that it starts can have either."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last one, or not allowed to: then there are none to drop


def drop_capabilities() -> None:
    """None is left, and no program that is started can bring one back."""
    bar_capabilities()
    libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = _CapHeader(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked("capset", libc.capset(ctypes.byref(header), ctypes.byref(nothing)))


def leave_keyrings() -> None:
    """A session keyring of its own, so that the host's keys are not in this process's possession."""
    number = SYS_KEYCTL.get(machine())
    if number is not None:
        libc.syscall(ctypes.c_long(number), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)
