"""vLLM as the engine: in a process of its own, with a copy of the learner's weights."""

from covey.rollout.vllm.engine import VllmEngine, VllmSettings

__all__ = ["VllmEngine", "VllmSettings"]
