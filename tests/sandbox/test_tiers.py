"""The choice of a tier, the message if none works, and the seccomp filter as the kernel interprets it."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from covey.cli import doctor
from covey.errors import InputError
from covey.sandbox import TIERS, choose, describe, tiers
from covey.sandbox.inside import kernel
from covey.sandbox.inside.isolation import closed_folder
from covey.sandbox.tiers import Finding, view


def pretend(monkeypatch: pytest.MonkeyPatch, *working: str) -> None:
    monkeypatch.setattr(tiers, "examine", lambda tier: Finding(tier, tier.name in working, "why not", "the fix"))


@pytest.mark.parametrize(
    ("working", "chosen"),
    [(("bubblewrap", "namespaces", "limits"), "bubblewrap"), (("namespaces", "limits"), "namespaces")],
)
def test_the_strongest_is_chosen(working: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *working)
    assert choose().name == chosen
    assert choose(allow_weak=True).name == chosen
    assert choose("namespaces").name == "namespaces"


def test_the_weak_one_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "limits")
    assert choose(allow_weak=True).name == "limits"
    for tier in ("auto", "limits"):
        with pytest.raises(InputError, match=r"sandbox\.allow_weak=true"):
            choose(tier)
    with pytest.raises(InputError, match=r"namespaces +why not\n +fix: the fix"):
        choose()


def test_a_requested_tier_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "namespaces")
    with pytest.raises(InputError, match=r"sandbox\.tier=bubblewrap does not work here"):
        choose("bubblewrap")
    with pytest.raises(InputError, match=r"did you mean +namespaces"):
        choose("namespace")


def test_without_bwrap_the_doctor_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    tiers.examine.cache_clear()
    found = describe()[0]
    tiers.examine.cache_clear()
    assert (found.works, found.detail, found.fix) == (False, "bwrap is not installed", "apt-get install bubblewrap")


def test_a_broken_bwrap_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed but does not work, as in many containers."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'no permission to make a namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    tiers.examine.cache_clear()
    found = tiers.examine(TIERS["bubblewrap"])
    tiers.examine.cache_clear()
    assert (found.works, found.detail) == (False, "no permission to make a namespace")


def test_the_doctor_lists_every_tier() -> None:
    lines = {finding.what: finding for finding in doctor.examine() if finding.what.startswith("sandbox")}
    assert list(lines) == [f"sandbox: {name}" for name in TIERS]
    for found in describe():
        assert lines[f"sandbox: {found.tier.name}"].mark == ("ok" if found.works and not found.tier.weak else "--")


def test_the_view_holds_the_interpreter_and_no_home() -> None:
    seen = view()
    assert any(os.__file__.startswith(path + "/") for path in seen["binds"])
    assert not {"/", "/home", "/root", "/etc", "/var", "/run", os.getcwd(), str(Path.home())} & set(seen["binds"])


def test_a_project_below_usr_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/usr/share")
    view.cache_clear()
    hidden = view()["hide"]
    view.cache_clear()
    assert "/usr/share" in hidden


def test_folders_closed_to_the_user_nobody(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755) if folder.stat().st_uid == os.geteuid() else None
    closed.chmod(0o700)
    assert closed_folder(str(closed / "inner" / "file")) == str(closed)
    assert closed_folder("/usr/bin/env") is None


# -- The filter, by an independent interpreter ------------------------------------------------------------------------


def verdict(
    program: bytes, number: int, argument: int = 0, architecture: int = 0xC000003E, more: tuple[int, int] = (0, 0)
) -> int:
    """A BPF interpreter for the instructions that the filter uses."""
    steps = [struct.unpack_from("HBBI", program, offset) for offset in range(0, len(program), 8)]
    seen = {0: number, 4: architecture, 16: argument, 24: more[0], 32: more[1]}
    value, position = 0, 0
    while True:
        code, then, otherwise, constant = steps[position]
        position += 1
        if code == 0x20:
            value = seen[constant]
        elif code == 0x06:
            return constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            position += then if holds else otherwise


@pytest.mark.parametrize(("machine", "column", "name"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)])
def test_what_the_filter_refuses(machine: str, column: int, name: int) -> None:
    program = kernel.filter_program(machine)
    allow, refuse = 0x7FFF0000, 0x00050000
    refused = {numbers[column] for numbers in kernel.REFUSED.values()} - {None}
    clone, socket = kernel.CLONE[column], kernel.SOCKET[column]
    for number in range(470):
        found = verdict(program, number, architecture=name)
        if number in refused:
            assert found == refuse | errno.EPERM
        elif number == 435:
            assert found == refuse | errno.ENOSYS
        else:
            assert found == (refuse | errno.EACCES if number == socket else allow), number
    assert verdict(program, clone, 17, name) == allow  # fork
    assert verdict(program, clone, 0x3D0F00, name) == allow  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, clone, 17 | flag, name) == refuse | errno.EPERM
    assert verdict(program, socket, 1, name) == allow  # local sockets
    for family in (2, 10, 16, 17):  # IPv4, IPv6, netlink, packets
        assert verdict(program, socket, family, name) == refuse | errno.EACCES
    setting = {option: verdict(program, kernel.SETSOCKOPT[column], 5, name, (1, option)) for option in range(64)}
    assert {option for option, found in setting.items() if found == refuse | errno.EPERM} == {7, 8, 32, 33}
    assert set(setting.values()) == {allow, refuse | errno.EPERM}
    assert verdict(program, kernel.SETSOCKOPT[column], 5, name, (6, 7)) == allow  # of TCP, not of the socket
    assert verdict(program, 0, architecture=0x40000003) == 0x80000000  # the calls of another architecture
    if column == 0:
        assert verdict(program, 0x40000000 | 41, 2) == 0x80000000


def test_call_numbers_match_the_kernel_headers() -> None:
    """Compared with the C library's header, if it is installed."""
    headers = {
        "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0),
        "aarch64": ("/usr/include/asm-generic/unistd.h", 1),
    }
    path, column = headers.get(os.uname().machine, ("", 0))
    if not os.path.exists(path):
        pytest.skip("no header of the kernel's here")
    lines = (line.split() for line in Path(path).read_text().splitlines())
    known = {words[1].removeprefix("__NR_"): words[2] for words in lines if len(words) == 3 and words[0] == "#define"}
    for call, numbers in {**kernel.REFUSED, "socket": kernel.SOCKET, "clone": kernel.CLONE}.items():
        if call in known:
            assert str(numbers[column]) == known[call], call


# -- an ordinary user ------------------------------------------------------------------------------------------------

ORDINARY = """
import asyncio, os, sys
sys.path.insert(0, SRC)
from covey.sandbox import Sandbox, choose, describe
found = next(found for found in describe() if found.tier.name == TIER)
if not found.works:
    print("skip", found.detail); sys.exit()
program = '''
import os
print(os.getuid())
def read(): open(SECRET).read()
def write(): open('/usr/x', 'w')
def signal(): os.kill(PID, 0)
def rise(): os.setuid(0)
for attempt in (read, write, signal, rise):
    try: attempt(); print('ESCAPED')
    except OSError: pass
print([line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')])
'''
outcome = asyncio.run(Sandbox(found.tier).run(f"SECRET, PID = {SECRET!r}, {os.getpid()}" + program))
print(outcome.stdout + outcome.stderr)
"""


@pytest.mark.parametrize("tier", ["bubblewrap", "namespaces"])
def test_an_ordinary_user_has_the_same_isolation(tier: str) -> None:
    """The other tests run as the current user, which is often root in a container."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not os.path.exists(python):
        pytest.skip("needs root to become an ordinary user, setpriv, and a Python for everybody")
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    source = Path(__file__).parents[2] / "src"
    if version.stdout != "True\n" or closed_folder(str(source / "covey" / "sandbox")):
        pytest.skip("needs a Python 3.11 and a project that everybody can read")
    secret = Path("/var/tmp") / f"covey-secret-{os.getpid()}"
    secret.write_text("secret")
    script = f"SRC, TIER, SECRET = {str(source)!r}, {tier!r}, {str(secret)!r}\n" + ORDINARY
    try:
        assert secret.read_text() == "secret"
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        done = subprocess.run([*user, python, "-B", "-c", script], capture_output=True, text=True, cwd="/", timeout=60)
    finally:
        secret.unlink()
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout)
    assert done.stdout.split("\n")[:2] == ["1000", "['0000000000000000']"], done
