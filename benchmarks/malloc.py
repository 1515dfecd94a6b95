"""Time saved on a CPU by keeping freed memory: updates of the built-in model, alternating with and without.

.venv/bin/python benchmarks/malloc.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 3


def measure(keep: bool) -> float:
    """Median seconds of an update (5 groups of 16 answers, 69 + 9 tokens), after two warm-up updates."""
    from kit.models import random_ids
    from kit.pipeline import made_up

    from covey.algorithms import make
    from covey.config.schema import LearnerConfig, ModelConfig
    from covey.learner.learner import Learner
    from covey.models import loading
    from covey.training.samples import minibatches, to_samples

    if not keep:
        loading.keep_freed_memory = lambda: False
    config = ModelConfig()
    model = loading.load_policy(loading.open_source(config), config)
    vocabulary = model.config.vocab_size
    prompts = random_ids(vocabulary, 5, 69, "prompts")
    answers = [random_ids(vocabulary, 16, 9, ("answers", number)) for number in range(5)]
    samples = to_samples(made_up(prompts, answers), {"checksum": 1.0})
    algorithm = make("gvpo", reference="old")
    learner = Learner(model, LearnerConfig(lr=1e-6), total_updates=10)
    times = []
    for _ in range(6):
        (batch,) = minibatches(samples, algorithm.advantages(samples), groups_per_batch=None, epochs=1)
        start = time.perf_counter()
        learner.update(batch, algorithm)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(keep=sys.argv[1] == "keep"))
        return
    found: dict[str, list[float]] = {"give back": [], "keep": []}
    for _ in range(REPEATS):
        for name, times in found.items():
            done = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True)
            times.append(float(done.stdout.split()[-1]))
    for name, times in found.items():
        print(f"{name:10} {statistics.median(times):.2f} s an update   ({', '.join(f'{t:.2f}' for t in times)})")
    ratio = statistics.median(found["keep"]) / statistics.median(found["give back"])
    print(f"ratio      {ratio:.2f}")


if __name__ == "__main__":
    main()
