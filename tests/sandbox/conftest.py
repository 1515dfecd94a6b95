"""Sandboxes of every tier that works here; a test of one that does not is skipped, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from covey.sandbox import TIERS, Limits, Sandbox
from covey.sandbox.tiers import examine

T = TypeVar("T")
WALLED = ("bubblewrap", "namespaces")


def run(awaitable: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaitable)


def sandbox_of(tier: str, **options: Any) -> Sandbox:
    found = examine(TIERS[tier])
    if not found.works:
        pytest.skip(f"{tier}: {found.detail}")
    return Sandbox(TIERS[tier], **options)


@pytest.fixture(params=[*WALLED, "limits"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """With the usual limits, in each tier."""
    return sandbox_of(request.param)


@pytest.fixture
def walled() -> Sandbox:
    """One with walls."""
    return quickest_walls(limits=Limits(seconds=20))


def quickest_walls(**options: Any) -> Sandbox:
    for tier in reversed(WALLED):
        if examine(TIERS[tier]).works:
            return sandbox_of(tier, **options)
    pytest.skip("no tier with walls works here")
