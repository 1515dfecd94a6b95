"""Ray's messages, as Ray 2.60 writes them, and their short form."""

from __future__ import annotations

import pytest

from covey.cluster.actors import LONGEST, cause_of_death, last_message, relay

DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tactor_id: ff1f42\n\tpid: 18139\n"
    "\tnamespace: 383d\n\tip: 127.0.0.1\nThe actor is dead because its worker process has died. Worker exit type: "
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called."
)
MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: dba75a) was "
    "22.49GB used / 23.54GB limit (0.955)\nOOM kill reason: Memory usage exceeded threshold\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n18273\t0.23\tpython"
)


def test_a_process_that_was_killed() -> None:
    found = cause_of_death(DIED)
    assert found.startswith("its process (pid 18139 on 127.0.0.1) was killed or crashed") and "\n" not in found
    other = DIED.replace("with a connection error code 2. End of file.", "after it was told to.")
    assert (
        cause_of_death(other)
        == "its process (pid 18139 on 127.0.0.1) ended: Worker unexpectedly exits after it was told to."
    )
    killed = DIED[: DIED.index("The actor is dead")] + "The actor is dead because it was killed by `ray.kill`."
    assert cause_of_death(killed) == "The actor is dead because it was killed by `ray.kill`."
    assert cause_of_death("") == "its process ended"


@pytest.mark.parametrize("text", [MEMORY, MEMORY.replace(" used / ", " / "), f"\x1b[36m{MEMORY}\x1b[39m"])
def test_a_process_that_rays_memory_monitor_killed(text: str) -> None:
    cause, *advice = cause_of_death(text).splitlines()
    assert cause == "Ray's memory monitor killed it: 22.49 of 23.54 GB of memory on 10.0.0.7 were in use"
    for setting in ("cluster.rollout_devices", "learner.micro_batch_tokens", "rollout.max_sequences"):
        assert setting in " ".join(advice)


def test_the_settings_that_are_advised_exist() -> None:
    import re
    from functools import reduce

    from covey.cluster.actors import LESS_MEMORY
    from covey.config.schema import Config

    for setting in re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]", LESS_MEMORY):
        reduce(getattr, setting.split("."), Config())


def test_log_lines_lose_their_prefix_and_colours() -> None:
    line = "[2026-11-16 14:12:17,859 W 13421 13421] rpc_client.h:153: Failed to connect to GCS at 10.0.0.1:1."
    assert last_message(f"first\n\x1b[33m{line}\x1b[0m\n\n") == "Failed to connect to GCS at 10.0.0.1:1."
    assert last_message("ConnectionError: none") == "ConnectionError: none"
    assert last_message("") == "no message"


def test_what_ray_prints_about_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Deaths of workers are reported by what used them; the rest is one line without colours."""
    relay({"lines": ["A worker died or was killed while executing a task"], "pid": "raylet", "is_err": False}, False)
    relay({"lines": ["\x1b[33mThe node with id 7\nwas marked dead\x1b[0m " + "x" * 999], "pid": "raylet"}, False)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Ray: The node with id 7 was marked dead xxx")
    assert err.count("\n") == 1 and len(err) <= len("Ray: ") + LONGEST + 1
