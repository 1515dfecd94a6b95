"""The embedded engine: samples in this process, with the learner's own weights.

engine.py       EmbeddedEngine: requests on the event loop, steps on a thread of its own, stop conditions
scheduler.py    which requests are in the batch                 runner.py      prefill, decode, sampling
allocation.py   which block or row holds which tokens           cache.py       keys and values, attention over them
cpu_batch.py    the batch on a CPU: a row per sequence          attention.py   the hook into transformers' models
gpu_batch.py    the batch on a GPU: paged cache, decode runs    slots.py       the batch's rows on a GPU
graphs.py       captured CUDA graphs, fused layers              kernels.py     their Triton kernels
"""

from covey.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
