"""Landlock and seccomp: a second wall behind the first, where the kernel offers them.

Landlock: files below the named folders may be read, below the writable ones written; no TCP; no signals and no
abstract sockets to processes outside. seccomp: calls that only serve to break out, or to hold memory that no limit
counts, are refused; sockets other than local ones are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from covey.sandbox.inside import kernel

# -- Landlock --------------------------------------------------------------------------------------------------------

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
READING = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
KNOWN_BY = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # version: rights it knows


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(0, kernel.libc.syscall(ctypes.c_long(kernel.SYS_LANDLOCK_CREATE), None, ctypes.c_long(0), 1))


def landlock(readable: list[str], writable: list[str]) -> bool:
    version = landlock_version()
    if version < 1:
        return False
    known = max(rights for since, rights in KNOWN_BY.items() if since <= version)
    rules = _Ruleset(known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.syscall("landlock", kernel.SYS_LANDLOCK_CREATE, ctypes.byref(rules), size, 0)
    for paths, rights in ((readable, READING), (writable, known)):
        for path in paths:
            _allow(ruleset, path, rights & known)
    kernel.syscall("landlock", kernel.SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = _Beneath(rights if os.path.isdir(path) else rights & OF_FILES, folder)
    kernel.syscall("landlock", kernel.SYS_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
    os.close(folder)


# -- seccomp ---------------------------------------------------------------------------------------------------------

# call: (x86_64, aarch64); None where the architecture has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "open_tree_attr": (467, 467),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
SOCKET, SETSOCKOPT, CLONE, CLONE3 = (41, 198), (54, 208), (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, what the kernel calls it
NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
AF_UNIX = 1
SOL_SOCKET, BUFFERS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and the FORCE of each
X32 = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the packet filter
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4  # offsets in what the filter sees
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT = 16, 24, 32


def filter_program(architecture: str) -> bytes:
    column, name = ARCHITECTURES[architecture]

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    def refuse(number: int) -> bytes:
        return step(RETURN, REFUSE | number)

    steps = [step(LOAD, ARCHITECTURE), step(EQUAL, name, 1, 0), step(RETURN, KILL), step(LOAD, NUMBER)]
    if column == 0:  # the second table of an x86_64 kernel
        steps += [step(AT_LEAST, X32, 0, 1), step(RETURN, KILL)]
    for numbers in REFUSED.values():
        call = numbers[column]
        if call is not None:
            steps += [step(EQUAL, call, 0, 1), refuse(errno.EPERM)]
    # clone3 hides its flags behind a pointer; without it the C library falls back on clone
    steps += [step(EQUAL, CLONE3[column], 0, 1), refuse(errno.ENOSYS)]
    steps += [step(EQUAL, CLONE[column], 0, 4), step(LOAD, FIRST_ARGUMENT)]
    steps += [step(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse(errno.EPERM), step(RETURN, ALLOW)]
    # what lies in a socket's buffer is nobody's memory: how large it may be is not theirs to say
    steps += [step(EQUAL, SETSOCKOPT[column], 0, 9), step(LOAD, SECOND_ARGUMENT), step(EQUAL, SOL_SOCKET, 0, 6)]
    steps += [step(LOAD, THIRD_ARGUMENT), *(step(EQUAL, option, 3 - n, n // 3) for n, option in enumerate(BUFFERS))]
    steps += [refuse(errno.EPERM), step(RETURN, ALLOW)]
    steps += [step(EQUAL, SOCKET[column], 0, 3), step(LOAD, FIRST_ARGUMENT)]
    steps += [step(EQUAL, AF_UNIX, 1, 0), refuse(errno.EACCES), step(RETURN, ALLOW)]
    return b"".join(steps)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def seccomp() -> bool:
    architecture = kernel.machine()
    if architecture not in ARCHITECTURES or struct.calcsize("P") != 8:
        return False
    program = filter_program(architecture)
    wanted = _Filter(len(program) // 8, program)
    if kernel.libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(wanted), 0, 0) < 0:  # PR_SET_SECCOMP, filter
        if ctypes.get_errno() == errno.EINVAL:  # a kernel without it
            return False
        kernel.checked("seccomp", -1)
    return True
