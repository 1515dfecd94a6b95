"""Sandboxes of every tier that works here; a test of one that does not is skipped, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from covey.sandbox import TIERS, Limits, Sandbox
from covey.sandbox.tiers import examine

T = TypeVar("T")
ISOLATED = ("bubblewrap", "namespaces")


def run(awaitable: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaitable)


def sandbox_of(tier: str, **options: Any) -> Sandbox:
    found = examine(TIERS[tier])
    if not found.works:
        pytest.skip(f"{tier}: {found.detail}")
    return Sandbox(TIERS[tier], **options)


@pytest.fixture(params=[*ISOLATED, "limits"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """With the usual limits, in each tier."""
    return sandbox_of(request.param)


@pytest.fixture
def isolated() -> Sandbox:
    """A sandbox of a tier that isolates."""
    return quickest_isolated(limits=Limits(seconds=20))


def quickest_isolated(**options: Any) -> Sandbox:
    for tier in reversed(ISOLATED):
        if examine(TIERS[tier]).works:
            return sandbox_of(tier, **options)
    pytest.skip("no tier that isolates works here")
