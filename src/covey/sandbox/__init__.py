"""The only place that runs code a model wrote: docs/sandbox.md."""

from covey.sandbox.hidden_tests import Asserts, Cases, Function, Tests, hidden_tests
from covey.sandbox.outcome import Limits, Outcome, SandboxError, TestResult, Verdict
from covey.sandbox.sandbox import Sandbox, Session
from covey.sandbox.tiers import TIERS, Finding, Tier, choose, describe

__all__ = [
    "TIERS",
    "Asserts",
    "Cases",
    "Finding",
    "Function",
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "Session",
    "TestResult",
    "Tests",
    "Tier",
    "Verdict",
    "choose",
    "describe",
    "hidden_tests",
]
