"""The embedded engine: samples in this process, with the learner's own weights."""

from covey.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
