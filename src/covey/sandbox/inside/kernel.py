"""System calls that Python does not wrap (through ctypes), and the two kernel filters built on them.

A failed call raises OSError with the call's name. The filters are a second line of defence behind the namespaces, where
the kernel has them:

Landlock  Only the named folders can be read and only the writable ones written; no TCP; no signals and no abstract
          sockets to processes outside.
seccomp   Refuses calls that only help to break out or to hold memory that no limit counts, and all but local sockets.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4

# The numbers of these calls are the same on every architecture: they were added after the tables were unified.
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
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(call, libc.syscall(ctypes.c_long(number), *converted))


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
        raise OSError(f"pivot_root: its number on {machine()} is unknown")
    syscall("pivot_root", number, os.fsencode(new), os.fsencode(old))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def mount_attributes(path: str, attributes: int, *, recursive: bool = True) -> None:
    """Set attributes on a mount and, with `recursive`, on every mount below it."""
    value = _MountAttributes(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    arguments = (AT_FDCWD, os.fsencode(path), flags, ctypes.byref(value), ctypes.sizeof(value))
    syscall(f"mount_setattr {path}", SYS_MOUNT_SETATTR, *arguments)


def bind(source: str, target: str, attributes: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    mount_attributes(target, attributes)


def prctl(option: int, value: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    checked(f"prctl {option}", libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def bar_capabilities() -> None:
    """Empty the bounding set, so that no program this process executes can gain a capability."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last capability, or without the right to drop any


def drop_capabilities() -> None:
    """Drop every capability, and make sure that no executed program can regain one."""
    bar_capabilities()
    libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = _CapHeader(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked("capset", libc.capset(ctypes.byref(header), ctypes.byref(nothing)))


def leave_keyrings() -> None:
    """Join a new session keyring, so that this process does not possess the host's keys."""
    number = SYS_KEYCTL.get(machine())
    if number is not None:
        libc.syscall(ctypes.c_long(number), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)


# -- Landlock --------------------------------------------------------------------------------------------------------

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
READING = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
RIGHTS_SINCE = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    5: (1 << 16) - 1,
}  # Landlock version: rights it knows


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def landlock_version() -> int:
    """0 on a kernel without Landlock."""
    return max(0, libc.syscall(ctypes.c_long(SYS_LANDLOCK_CREATE), None, ctypes.c_long(0), 1))


def landlock(readable: list[str], writable: list[str]) -> bool:
    version = landlock_version()
    if version < 1:
        return False
    known = max(rights for since, rights in RIGHTS_SINCE.items() if since <= version)
    rules = _Ruleset(known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall("landlock", SYS_LANDLOCK_CREATE, ctypes.byref(rules), size, 0)
    for paths, rights in ((readable, READING), (writable, known)):
        for path in paths:
            _allow(ruleset, path, rights & known)
    syscall("landlock", SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = _Beneath(rights if os.path.isdir(path) else rights & FILE_RIGHTS, folder)
    syscall("landlock", SYS_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
    os.close(folder)


# -- seccomp ---------------------------------------------------------------------------------------------------------

# call: number on (x86_64, aarch64); None if the architecture has no such call
# fmt: off
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "fanotify_init": (300, 262),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "open_tree_attr": (467, 467), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None),
}
# fmt: on
SOCKET, SETSOCKOPT, CLONE, CLONE3 = (41, 198), (54, 208), (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, the kernel's identifier
NEW_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
AF_UNIX = 1
SOL_SOCKET, BUFFERS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their FORCE variants
X32 = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT = 16, 24, 32


def filter_program(architecture: str) -> bytes:
    column, name = ARCHITECTURES[architecture]

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    def refuse(number: int) -> bytes:
        return step(RETURN, REFUSE | number)

    steps = [step(LOAD, ARCHITECTURE), step(EQUAL, name, 1, 0), step(RETURN, KILL), step(LOAD, NUMBER)]
    if column == 0:  # the x32 system call table of an x86_64 kernel
        steps += [step(AT_LEAST, X32, 0, 1), step(RETURN, KILL)]
    for numbers in REFUSED.values():
        call = numbers[column]
        if call is not None:
            steps += [step(EQUAL, call, 0, 1), refuse(errno.EPERM)]
    # clone3 hides its flags behind a pointer; without it the C library falls back on clone
    steps += [step(EQUAL, CLONE3[column], 0, 1), refuse(errno.ENOSYS)]
    steps += [step(EQUAL, CLONE[column], 0, 4), step(LOAD, FIRST_ARGUMENT)]
    steps += [step(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse(errno.EPERM), step(RETURN, ALLOW)]
    # memory in socket buffers belongs to no process, so the program may not change their size
    steps += [step(EQUAL, SETSOCKOPT[column], 0, 9), step(LOAD, SECOND_ARGUMENT), step(EQUAL, SOL_SOCKET, 0, 6)]
    steps += [step(LOAD, THIRD_ARGUMENT), *(step(EQUAL, option, 3 - n, n // 3) for n, option in enumerate(BUFFERS))]
    steps += [refuse(errno.EPERM), step(RETURN, ALLOW)]
    steps += [step(EQUAL, SOCKET[column], 0, 3), step(LOAD, FIRST_ARGUMENT)]
    steps += [step(EQUAL, AF_UNIX, 1, 0), refuse(errno.EACCES), step(RETURN, ALLOW)]
    return b"".join(steps)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def seccomp() -> bool:
    architecture = machine()
    if architecture not in ARCHITECTURES or struct.calcsize("P") != 8:
        return False
    program = filter_program(architecture)
    loaded = _Filter(len(program) // 8, program)
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(loaded), 0, 0) < 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        if ctypes.get_errno() == errno.EINVAL:  # a kernel without seccomp
            return False
        checked("seccomp", -1)
    return True
