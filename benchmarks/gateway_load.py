"""Load test of the gateway with many concurrent clients: latency, and whether anything is lost, mixed up or leaked.

    .venv/bin/python benchmarks/gateway_load.py [--clients 200] [--rounds 5] [--turns 4]

`covey serve` runs a tiny random model in its own process; the clients are in this process, on loopback. Of twenty
clients, one disconnects during a reply, one reads its stream byte by byte, one has a wrong key, one sends a body that
is too large, and two stream; every fifth of the others requests two replies at once. After each round the server must
hold no request, cache row or episode, and the recorded episodes must contain each session once, with exactly the tokens
that its client received.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kit.load import Crowd, Session, wrongs
from kit.processes import Seen, look

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TOKEN = "a-token-for-this-benchmark-only"
SETTINGS = ["rollout.max_tokens=64", "gateway.port=0", "loop.threads=1"]


# -- the server's process -----------------------------------------------------------------------------------------


async def serve(folder: Path) -> None:
    """covey serve, extended: a line on its standard input prints the resources that it holds."""
    from covey.app.loaded_model import load_model, prepare_model, sampling
    from covey.app.serving import Recorder, make_registry
    from covey.cli.parse import parse
    from covey.cli.serve import USAGE
    from covey.gateway.server import Server
    from covey.memory import trim_freed_memory

    loaded = load_model(prepare_model(parse([str(folder / "model"), *SETTINGS]), USAGE, needs_tasks=False))
    registry = make_registry(loaded, Recorder(folder / "record", loaded.collector.renderer.decode))
    engine: Any = loaded.engine
    async with sampling(loaded):
        server = Server(registry, 0)
        await server.start()
        print(json.dumps({"url": server.url}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            gc.collect()
            trim_freed_memory()
            held = {
                "episodes": len(registry._open),
                "requests": len(engine._futures),
                "rows": len(engine._batch.scheduler.blocks._held),
                "tasks": len(asyncio.all_tasks()),
            }
            print(json.dumps(held), flush=True)
        await server.stop()


class House:
    """The server's process as the clients' process sees it."""

    def __init__(self, folder: Path) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "COVEY_TOKEN": TOKEN, "TMPDIR": str(folder / "temporary")}
        (folder / "temporary").mkdir()
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.url: str = self._line()["url"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def held(self) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def seen(self) -> Seen:
        found = look(self.process.pid, self.folder / "temporary")
        assert found is not None
        return found

    def record(self) -> list[dict[str, Any]]:
        path = self.folder / "record" / "episodes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


# -- the clients' -------------------------------------------------------------------------------------------------


async def measure(house: House, clients: int, rounds: int, turns: int) -> dict[str, Any]:
    crowd = Crowd(house.url, TOKEN, turns=turns, replies=2)
    sessions: list[Session] = []
    moments, seconds = [], 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        sessions += await crowd.play(clients)
        seconds += time.perf_counter() - begin
        print(f"{len(sessions)} sessions, {seconds:.1f} s", file=sys.stderr, flush=True)
        await crowd.http.aclose()
        await asyncio.sleep(1)
        kept, held = house.seen().rss, house.held()
        moments.append({"held": held, "kept": kept, "rss": house.seen().rss, "files": house.seen().files})
        crowd.http = Crowd(house.url, TOKEN, turns=turns).http
    await crowd.http.aclose()
    waits = sorted(wait for session in sessions for wait in session.seconds)
    kinds = Counter(session.kind for session in sessions)
    return {
        "clients": clients,
        "sessions": len(sessions),
        "kinds": dict(kinds),
        "requests": len(waits),
        "requests_per_second": len(waits) / seconds,
        "p50": waits[len(waits) // 2],
        "p95": waits[int(0.95 * len(waits))],
        "p99": waits[int(0.99 * len(waits))],
        "refused": dict(Counter(status for session in sessions for status in session.refused)),
        "lost_requests": sum(session.lost for session in sessions),
        "wrongs": wrongs(sessions, house.record()),
        "recorded": len(house.record()),
        "rounds": moments,
    }


def table(found: dict[str, Any]) -> str:
    last = found["rounds"][-1]
    kept, used = (" → ".join(f"{moment[name]:.0f}" for moment in found["rounds"]) for name in ("kept", "rss"))
    rows = {
        "clients at once": found["clients"],
        "sessions": f"{found['sessions']} ({', '.join(f'{n} {kind}' for kind, n in found['kinds'].items())})",
        "requests answered": f"{found['requests']}, {found['requests_per_second']:.0f}/s",
        "wait, p50 / p95 / p99": " / ".join(f"{found[name]:.2f} s" for name in ("p50", "p95", "p99")),
        "refused, by status (0: hung up)": found["refused"],
        "recorded wrongly, twice or not at all": len(found["wrongs"]),
        "held afterwards": ", ".join(f"{value} {name}" for name, value in last["held"].items()),
        "open files after each round": " → ".join(str(moment["files"]) for moment in found["rounds"]),
        "RSS after each round, MiB": kept,
        "RSS after each round, when what was freed and kept has gone back": used,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
        return 0
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        from kit.caller import save

        save(folder / "model", (), ends=0.02)
        house = House(folder)
        try:
            found = asyncio.run(measure(house, given.clients, given.rounds, given.turns))
        finally:
            house.close()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"gateway-load-{time.strftime('%Y%m%d-%H%M%S')}.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    print("\n".join(found["wrongs"][:20]))
    return 1 if found["wrongs"] else 0


if __name__ == "__main__":
    sys.exit(main())
