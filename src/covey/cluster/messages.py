"""What Ray says, in one plain sentence: without colour codes, ids and advice about Ray's own settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

LONGEST = 300  # characters of a message that is passed on

LESS_MEMORY = (
    "lower cluster.rollout_devices or cluster.learner_devices (each process has its own copy of the model),\n"
    "  learner.micro_batch_tokens, rollout.max_sequences or rollout.memory; or take a smaller model, or model.lora.rank"
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] (?:\(\w+\) )?(?:[\w.]+:\d+: )?")  # [date time W pid tid] file.cc:210:
_MEMORY = re.compile(r"\(IP: ([^,)]+).*?\)[^(]*?([\d.]+)GB(?: used)? / ([\d.]+)GB", re.DOTALL)
_PLACE = re.compile(r"\bpid: (\d+).*?\bip: (\S+)", re.DOTALL)
_DETAIL = re.compile(r"Worker exit detail: (.+?)(?= (?:Some common causes|There are some potential)|\n|$)")
_REPORTED = ("A worker died or was killed", "worker(s) were killed due to the node running low")


def plain(text: str) -> str:
    return _COLOUR.sub("", text)


def cause_of_death(text: str) -> str:
    """Why an actor is gone, from Ray's error. For want of memory, a second line says what to lower."""
    text = plain(text)
    if "low on memory" in text or "OUT_OF_MEMORY" in text:
        return f"Ray's memory monitor killed it: {_memory(text)}\n  {LESS_MEMORY}"
    place = _PLACE.search(text)
    process = f"its process (pid {place[1]} on {place[2]})" if place else "its process"
    if "connection error" in text:  # Ray saw the connection close, and knows no more
        return f"{process} was killed or crashed (if the kernel was out of memory, dmesg says so)"
    if (detail := _DETAIL.search(text)) is not None:
        return f"{process} ended: {_short(detail[1])}"
    lines = [line for line in text.splitlines() if line and not line.startswith("\t")]
    return _short(lines[-1]) if lines else f"{process} ended"


def _memory(text: str) -> str:
    if (found := _MEMORY.search(text)) is None:
        return "its machine was low on memory"
    return f"{found[2]} of {found[3]} GB of memory on {found[1]} were in use"


def last_message(output: str) -> str:
    """The last thing that Ray's log lines or an exception said."""
    lines = [_LOG_PREFIX.sub("", line).strip() for line in plain(output).splitlines()]
    return _short(next((line for line in reversed(lines) if line), "no message"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def relay(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Stands in for Ray's printing of messages from the cluster. The death of a worker is reported by who used it."""
    for line in data["lines"]:
        if not any(known in line for known in _REPORTED):
            print(f"Ray: {_short(plain(line))}", file=sys.stderr)
