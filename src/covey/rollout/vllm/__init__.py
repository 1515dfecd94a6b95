"""The vLLM engine: vLLM in a process of its own, with a copy of the learner's weights (docs/rollout.md).

engine.py    the learner's side: generate, publish, pause, resume
process.py   the messages between the two sides; the worker's process, its log and its end
worker.py    the other side: vLLM's AsyncLLM, driven by these messages
"""

from covey.rollout.vllm.engine import VisionSettings, VllmEngine, VllmSettings

__all__ = ["VisionSettings", "VllmEngine", "VllmSettings"]
