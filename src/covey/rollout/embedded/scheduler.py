"""Who is in the batch. Plain Python: no torch.

add        a request waits
admit      waiting ones enter while there are rows and blocks; those with one prompt enter together
reserve    room for the next tokens of everybody; where there is none, the youngest goes back to wait
finish     leaves, and its blocks are free
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from covey.rollout.embedded.allocation import Found
from covey.types import Sampling, StopReason


@dataclass(eq=False)
class Running:
    """A request on its way. The first `cached` of its tokens are in the cache; the next is what the model is fed."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that drew each of `ids`
    stop: StopReason | None = None
    error: Exception | None = None  # why there is no answer
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    abandoned: bool = False  # nobody waits for it any more

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.ids)

    @property
    def next(self) -> int:
        """The token that the model is fed."""
        ahead = self.cached - len(self.prompt)
        return self.prompt[self.cached] if ahead < 0 else self.ids[ahead]

    @property
    def left(self) -> int:
        """Tokens it may still sample."""
        return self.sampling.max_tokens - len(self.ids)

    @property
    def sound(self) -> bool:
        """Whether its keys and values are known to be finite: every token was drawn after reading all that came before
        it, so one non-finite value would have shown in the next log-prob."""
        return bool(self.logprobs) and all(map(math.isfinite, self.logprobs))

    @property
    def longest(self) -> int:
        """Tokens it may grow to."""
        return len(self.prompt) + self.sampling.max_tokens


def refuse(queue: deque[Running], room: int) -> list[Running]:
    """Who would not fit if it were alone leaves the queue, with an error of its own."""
    refused = [request for request in queue if request.longest > room]
    for request in refused:
        queue.remove(request)
        request.error = ValueError(
            f"a request of {len(request.prompt)} + {request.sampling.max_tokens} tokens does not fit into a cache of "
            f"{room}: lower rollout.max_tokens, or raise rollout.memory"
        )
    return refused


@dataclass(frozen=True)
class Entry:
    """Sequences that enter with the same tokens, all but the last of which must be in the cache before they decode.
    The first `shared` are there already, in the leader's blocks, or to be copied there from `source`. Followers have
    the leader's full blocks, and blocks of their own to copy the rest to."""

    members: tuple[Running, ...]
    shared: int
    source: int | None = None

    @property
    def leader(self) -> Running:
        return self.members[0]


class Blocks(Protocol):
    """A BlockManager, or a RowManager."""

    @property
    def available(self) -> int: ...
    def count(self, tokens: int) -> int: ...
    def full(self, tokens: int) -> int: ...
    def match(self, tokens: Sequence[int]) -> Found: ...
    def allocate(self, count: int) -> list[int] | None: ...
    def hold(self, blocks: Sequence[int]) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...
    def remember(self, blocks: Sequence[int], tokens: Sequence[int]) -> None: ...
    def discard(self, blocks: Sequence[int]) -> None: ...
    def forget(self) -> None: ...


class Scheduler:
    def __init__(self, blocks: Blocks, max_rows: int) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Running) -> None:
        self.waiting.append(request)

    def admit(self) -> list[Entry]:
        """Waiting requests that can enter now, in their order, with blocks for their tokens so far."""
        entries: list[Entry] = []
        self.waiting = deque(request for request in self.waiting if not request.abandoned)
        while self.waiting and len(self.running) < self.max_rows:
            leader = self.waiting[0]
            found = self._lead(leader)
            if found is None:
                break
            entries.append(Entry((leader, *self._followers(leader)), found.shared, found.source))
        return entries

    def _lead(self, leader: Running) -> Found | None:
        """Blocks for all its tokens; what of them is in the cache already."""
        tokens = leader.tokens
        found = self.blocks.match(tokens)
        fresh = self._allocate(leader, self.blocks.count(len(tokens)) - len(found.blocks))
        if fresh is None:
            self.blocks.release(found.blocks)
            return None
        self._enter(leader, found.blocks + fresh, cached=len(tokens) - 1)
        self.blocks.remember(leader.blocks, tokens[:-1])
        in_place = found.source in fresh  # there was no other place
        return Found(leader.blocks, found.shared) if in_place else found

    def _followers(self, leader: Running) -> list[Running]:
        """Others with the same tokens. They hold the leader's full blocks and a copy of its last, unfinished one."""
        found: list[Running] = []
        full = self.blocks.full(leader.cached)
        for request in [r for r in self.waiting if r.prompt == leader.prompt and r.ids == leader.ids]:
            own = self._allocate(request, len(leader.blocks) - full) if len(self.running) < self.max_rows else None
            if own is None:
                break
            self.blocks.hold(leader.blocks[:full])
            self._enter(request, leader.blocks[:full] + own, leader.cached)
            found.append(request)
        return found

    def _allocate(self, request: Running, count: int) -> list[int] | None:
        """Blocks for who wants to enter, if one is left for everybody who will need another: who enters is not thrown
        out at once."""
        grace = sum(self._most(r) > len(r.blocks) for r in self.running)
        grace += self._most(request) > self.blocks.count(len(request.tokens))
        if self.running and count + grace > self.blocks.available:
            return None
        return self.blocks.allocate(count)

    def _most(self, request: Running) -> int:
        """Blocks that it will ever need: the last token of an answer is not fed."""
        return self.blocks.count(request.longest - 1)

    def _enter(self, request: Running, blocks: list[int], cached: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.blocks, request.cached = blocks, cached

    def reserve(self, steps: int) -> None:
        """Blocks for the next `steps` tokens of every runner, or as many as it has left."""
        for request in [r for r in self.running if self.blocks.count(r.cached + steps) > len(r.blocks)]:
            while request in self.running:
                need = self.blocks.count(request.cached + min(steps, request.left)) - len(request.blocks)
                fresh = self.blocks.allocate(need) if need > 0 else []
                if fresh is not None:
                    request.blocks += fresh
                    break
                self._send_back(self.running[-1])

    def reserve_if_free(self, steps: int) -> bool:
        """The same, if nobody must go for it; False: nothing was reserved."""
        need = {r: self.blocks.count(r.cached + min(steps, r.left)) - len(r.blocks) for r in self.running}
        if sum(count for count in need.values() if count > 0) > self.blocks.available:
            return False
        for request, count in need.items():
            if count > 0:
                request.blocks += self.blocks.allocate(count) or []
        return True

    def _send_back(self, request: Running) -> None:
        """It waits again, before all others, and keeps what it has sampled."""
        self.running.remove(request)
        self._leave(request)
        self.waiting.appendleft(request)

    def restart_prompts(self) -> None:
        """Weights have changed: a request that has not drawn a token yet waits again, so that its prompt is computed
        with the weights that its first token is drawn with."""
        for request in reversed([r for r in self.running if not r.ids]):
            self._send_back(request)

    def finish(self, request: Running) -> None:
        """Non-finite keys and values must not be found by a later request."""
        self.running.remove(request)
        self._leave(request, findable=request.sound)

    def _leave(self, request: Running, *, findable: bool = True) -> None:
        if findable:
            self.blocks.remember(request.blocks, request.tokens[: request.cached])
        else:
            self.blocks.discard(request.blocks)
        self.blocks.release(request.blocks)
        request.blocks, request.cached = [], 0
