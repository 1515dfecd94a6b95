"""The scheduler: which requests are in the batch, and which blocks of the cache they hold. Plain Python, no torch.

add        a request waits
admit      waiting requests enter while there are rows and blocks; requests with the same tokens enter together
reserve    allocates blocks for the next tokens of all running requests; if there are none, preempts the youngest
finish     a request leaves and its blocks are released
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from covey.rollout.embedded.allocation import PrefixMatch
from covey.types import ImageSpan, Sampling, StopReason


@dataclass(eq=False)
class RequestState:
    """A request and its progress. Its first `cached` tokens are in the cache; the model is fed the next one."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each of `ids`
    stop: StopReason | None = None
    error: Exception | None = None  # why the request failed
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    cancelled: bool = False  # its caller no longer waits
    images: tuple[ImageSpan, ...] = ()  # in the prompt
    features: Any = None  # of the images: `FeatureCache` of the engine (images.py)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.ids)

    def tokens_between(self, start: int, end: int) -> Sequence[int]:
        """`tokens[start:end]`, without a copy of all tokens."""
        prompt = len(self.prompt)
        return (*self.prompt[start:end], *self.ids[max(0, start - prompt) : max(0, end - prompt)])

    @property
    def keys(self) -> tuple[int, ...]:
        """Like `tokens`, but different where images differ: prefixes are shared by these."""
        return (*self.prompt_keys, *self.ids)

    @cached_property
    def prompt_keys(self) -> tuple[int, ...]:
        keys = list(self.prompt)
        for span in self.images:
            keys[span.start : span.end] = [-int(span.image.digest[:15], 16) - 1] * span.length
        return tuple(keys) if self.images else self.prompt

    @cached_property
    def prompt_hash(self) -> int:
        return hash(self.prompt_keys)

    @property
    def position_shift(self) -> int:
        """The position of a sampled token is its index plus this."""
        return sum(span.shift for span in self.images)

    @property
    def next_token(self) -> int:
        """The next token to feed to the model."""
        ahead = self.cached - len(self.prompt)
        return self.prompt[self.cached] if ahead < 0 else self.ids[ahead]

    @property
    def remaining(self) -> int:
        """Tokens it may still sample."""
        return self.sampling.max_tokens - len(self.ids)

    @property
    def is_finite(self) -> bool:
        """Its keys and values are known to be finite: every token attends to all tokens before it, so a non-finite
        value would show in the next log-prob."""
        return bool(self.logprobs) and all(map(math.isfinite, self.logprobs))

    @property
    def max_length(self) -> int:
        """The most tokens that it can have."""
        return len(self.prompt) + self.sampling.max_tokens


def reject_too_long(queue: deque[RequestState], capacity: int) -> list[RequestState]:
    """Remove the requests that would not fit into the empty cache from the queue, and set their errors."""
    rejected = [request for request in queue if request.max_length > capacity]
    for request in rejected:
        queue.remove(request)
        request.error = ValueError(
            f"a request of {len(request.prompt)} + {request.sampling.max_tokens} tokens does not fit into a cache of "
            f"{capacity}: lower rollout.max_tokens, or raise rollout.memory"
        )
    return rejected


@dataclass(frozen=True)
class PrefillGroup:
    """Requests that enter with the same tokens. All tokens but the last must be in the cache before they decode. The
    first `shared` are there already, in the leader's blocks or (`source`) in a block to copy them from. Followers share
    the leader's full blocks, and copy the last, partly filled one into a block of their own."""

    members: tuple[RequestState, ...]
    shared: int
    source: int | None = None

    @property
    def leader(self) -> RequestState:
        return self.members[0]

    @property
    def new_tokens(self) -> int:
        return self.leader.cached - self.shared

    @property
    def has_new_images(self) -> bool:
        """Whether tokens of an image must be computed."""
        return any(span.end > self.shared for span in self.leader.images)


class CacheAllocator(Protocol):
    """A `BlockManager` or a `RowManager` (allocation.py)."""

    @property
    def available(self) -> int: ...
    def count(self, tokens: int) -> int: ...
    def full(self, tokens: int) -> int: ...
    def match(self, tokens: Sequence[int]) -> PrefixMatch: ...
    def allocate(self, count: int) -> list[int] | None: ...
    def hold(self, blocks: Sequence[int]) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...
    def register(self, blocks: Sequence[int], tokens: Sequence[int]) -> None: ...
    def unregister(self, blocks: Sequence[int]) -> None: ...
    def flush(self) -> None: ...


class Scheduler:
    def __init__(self, blocks: CacheAllocator, max_rows: int) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._growing = 0  # running requests that will need more blocks, kept up to date by `admit`

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: RequestState) -> None:
        self.waiting.append(request)

    def admit(self) -> list[PrefillGroup]:
        """Move waiting requests to the batch, in order, with blocks for the tokens they have."""
        return list(self.admissions())

    def admissions(self) -> Iterator[PrefillGroup]:
        """`admit`, one group at a time: its tokens may be computed before the next group is admitted."""
        self.waiting = deque(request for request in self.waiting if not request.cancelled)
        if not self.waiting or len(self.running) == self.max_rows:
            return
        self._growing = sum(self._max_blocks(r) > len(r.blocks) for r in self.running)
        alike: dict[int, list[RequestState]] = {}  # waiting requests by the hash of their prompt
        for request in self.waiting:
            alike.setdefault(request.prompt_hash, []).append(request)
        while self.waiting and len(self.running) < self.max_rows:
            leader = self.waiting[0]
            match = self._admit_leader(leader)
            if match is None:
                break
            followers = self._admit_followers(leader, alike[leader.prompt_hash])
            yield PrefillGroup((leader, *followers), match.shared, match.source)

    def _admit_leader(self, leader: RequestState) -> PrefixMatch | None:
        """Allocate blocks for all of the leader's tokens. Returns their cached prefix, or None if there are too few
        blocks."""
        keys = leader.keys
        match = self.blocks.match(keys)
        fresh = self._allocate(leader, self.blocks.count(len(keys)) - len(match.blocks))
        if fresh is None:
            self.blocks.release(match.blocks)
            return None
        self._enter(leader, match.blocks + fresh, cached=len(keys) - 1)
        self.blocks.register(leader.blocks, keys[:-1])
        in_place = match.source in fresh  # the block to copy from was the only one left
        return PrefixMatch(leader.blocks, match.shared) if in_place else match

    def _admit_followers(self, leader: RequestState, alike: Sequence[RequestState]) -> list[RequestState]:
        """Admit those waiting requests among `alike` that have the same tokens as the leader."""
        followers: list[RequestState] = []
        full = self.blocks.full(leader.cached)
        waiting = (r for r in alike if not r.blocks)  # running requests hold blocks
        for request in [r for r in waiting if r.prompt_keys == leader.prompt_keys and r.ids == leader.ids]:
            own = self._allocate(request, len(leader.blocks) - full) if len(self.running) < self.max_rows else None
            if own is None:
                break
            self.blocks.hold(leader.blocks[:full])
            self._enter(request, leader.blocks[:full] + own, leader.cached)
            followers.append(request)
        return followers

    def _allocate(self, request: RequestState, count: int) -> list[int] | None:
        """Blocks for a request that enters, if one more is left for each request that will need another. Otherwise it
        would be preempted at once."""
        grace = self._growing + (self._max_blocks(request) > self.blocks.count(len(request.prompt) + len(request.ids)))
        if self.running and count + grace > self.blocks.available:
            return None
        return self.blocks.allocate(count)

    def _max_blocks(self, request: RequestState) -> int:
        """The most blocks that it needs: the last sampled token is not fed."""
        return self.blocks.count(request.max_length - 1)

    def _enter(self, request: RequestState, blocks: list[int], cached: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.blocks, request.cached = blocks, cached
        self._growing += self._max_blocks(request) > len(blocks)

    def reserve(self, steps: int) -> None:
        """Allocate blocks for the next `steps` tokens of every running request, or for its remaining tokens."""
        for request in [r for r in self.running if self.blocks.count(r.cached + steps) > len(r.blocks)]:
            while request in self.running:
                need = self.blocks.count(request.cached + min(steps, request.remaining)) - len(request.blocks)
                fresh = self.blocks.allocate(need) if need > 0 else []
                if fresh is not None:
                    request.blocks += fresh
                    break
                self._preempt(self.running[-1])

    def reserve_if_free(self, steps: int) -> bool:
        """Like `reserve`, but without preemption. Returns False and reserves nothing if there are too few free
        blocks."""
        need = {r: self.blocks.count(r.cached + min(steps, r.remaining)) - len(r.blocks) for r in self.running}
        if sum(count for count in need.values() if count > 0) > self.blocks.available:
            return False
        for request, count in need.items():
            if count > 0:
                request.blocks += self.blocks.allocate(count) or []
        return True

    def _preempt(self, request: RequestState) -> None:
        """Move a running request to the front of the queue. It keeps the tokens it has sampled."""
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def preempt_prefills(self) -> None:
        """After a change of weights: requests that have sampled nothing yet wait again, so that their prompts are
        computed with the weights that sample their first token."""
        for request in reversed([r for r in self.running if not r.ids]):
            self._preempt(request)

    def finish(self, request: RequestState) -> None:
        """Remove a finished request. Later requests may reuse its keys and values if they are finite."""
        self.running.remove(request)
        self._release(request, reusable=request.is_finite)

    def _release(self, request: RequestState, *, reusable: bool = True) -> None:
        if reusable:
            self.blocks.register(request.blocks, request.keys[: request.cached])
        else:
            self.blocks.unregister(request.blocks)
        self.blocks.release(request.blocks)
        request.blocks, request.cached = [], 0
