"""Runs code that a model wrote; nothing else in Covey does (docs/sandbox.md)."""

from covey.sandbox.hidden_tests import Asserts, Cases, Function, TestResult, Tests, Verdict, hidden_tests
from covey.sandbox.process import SandboxError
from covey.sandbox.sandbox import Outcome, Sandbox, Session
from covey.sandbox.tiers import TIERS, Finding, Limits, Tier, choose, describe

__all__ = ["TIERS", "Asserts", "Cases", "Finding", "Function", "Limits", "Outcome", "Sandbox", "SandboxError"]
__all__ += ["Session", "TestResult", "Tests", "Tier", "Verdict", "choose", "describe", "hidden_tests"]
