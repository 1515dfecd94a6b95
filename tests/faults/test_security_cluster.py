"""A Ray cluster started by a run is private: on the loopback interface, with a token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

TOKEN = "ab" * 32
PROGRAM = """
import os, sys
from covey.cluster import start
from covey.config.schema import ClusterConfig
start.secrets.token_hex = lambda size: KNOWN  # known to this test, which checks that it grants access
with start.open_cluster(ClusterConfig(name="ray")) as cluster:
    import ray
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    print("token", "RAY_AUTH_TOKEN" in os.environ, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()
"""
INTRUDER = """
import os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray changes the loopback address
if sys.argv[2]:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": sys.argv[2]}
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False
import ray
ray.init(address=sys.argv[1])
print("ENTERED", len(ray.nodes()), flush=True)
os._exit(0)
"""


def enters(address: str, token: str, environment: dict[str, str]) -> bool:
    """Ray retries for minutes if it is refused: no access within a while is enough."""
    command = [sys.executable, "-c", INTRUDER, address, token]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        return b"ENTERED" in (error.stdout or b"")
    return "ENTERED" in done.stdout


def family(root: int) -> set[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> list[str]:
    """Local addresses, as in /proc/net."""
    sockets = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        sockets |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]


def test_it_listens_on_the_loopback_and_requires_its_token() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("KNOWN", repr(TOKEN))],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdin is not None and run.stdout is not None
    fragments: dict[str, str] = {}
    try:
        for line in run.stdout:
            word, _, rest = line.strip().partition(" ")
            fragments[word] = rest
            if word == "ready":
                break
        assert fragments["address"].startswith("127.0.0.1:") and fragments["token"] == "False", (
            "programs do not inherit it"
        )
        open_doors = listening(family(run.pid))
        loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
        assert open_doors and [door for door in open_doors if not door.startswith(loopback)] == []
        assert enters(fragments["address"], TOKEN, environment), "who has the token comes in"
        assert not enters(fragments["address"], "", environment)
        assert not enters(fragments["address"], "0" * 64, environment)
    finally:
        run.stdin.close()
        run.wait(60)
        run.stdout.close()
