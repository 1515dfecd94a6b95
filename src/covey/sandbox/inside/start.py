"""What the first process of a sandbox does. `stage` says where it stands:

down    root's, before bubblewrap: becomes nobody and starts it
walls   the tier `namespaces`: builds the walls, then as inside
inside  within bubblewrap's walls
limits  no walls: limits only

Then, in every tier: a keeper, and under it the program with limits, no privileges, Landlock and seccomp.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not signal, which imports enum
import os
import resource

from covey.sandbox.inside import filters, keeper, kernel, walls

# A program waits for the imports of these modules: those that every sandbox needs import as little as they can.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OPEN_FILES = 256


def start(stage: str, request: dict[str, Any]) -> None:
    """Returns in the program's process, when the program may exit."""
    try:
        if stage == "down":
            walls.step_down(request["view"])
            walls.die_with_parent()
            os.execv(request["bubblewrap"][0], request["bubblewrap"])
        if os.getuid() == 0:
            walls.step_down(request["view"])
        walls.die_with_parent()
        if stage == "walls":
            walls.build(request["view"], request["limits"]["disk_mb"])
        os.chdir(request["folder"])
        keeper.keep(
            lambda: _harden(request),
            memory_mb=request["limits"]["memory_mb"],
            control=request["control"],
            alone=stage != "limits",
        )
    except Exception as error:  # the host hears of it; nothing of the model's has run
        import json

        report(request, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    _play(request)


def report(request: dict[str, Any], message: str) -> None:
    os.write(request["control"], message.encode() + b"\n")


def _harden(request: dict[str, Any]) -> None:
    walls.die_with_parent()
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # Covey may run in the background, where it is ignored
    _limit(request["limits"])
    kernel.leave_keyrings()
    kernel.drop_capabilities()
    landlock = seccomp = False
    if request["filters"]:
        landlock = filters.landlock(request["readable"], request["writable"])
        seccomp = filters.seccomp()
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
        # A second between the two: at the first the kernel sends a signal that tells why, at the last it just kills.
        limit(resource.RLIMIT_CPU, int(limits["cpu_seconds"]) + 2, more=1)


def _play(request: dict[str, Any]) -> None:
    role = request["role"]
    if role == "program":
        from covey.sandbox.inside import program

        program.run(request)
    elif role == "session":
        from covey.sandbox.inside import program

        program.session(request)
    elif role == "solution":
        from covey.sandbox.inside import solution

        solution.serve(request)
    else:
        assert role == "tests", role
        from covey.sandbox.inside import tests

        tests.run(request)
