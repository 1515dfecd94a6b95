"""Studies on a CPU, with the built-in SmolLM2-135M and generated tasks: an evening on two cores, without downloads."""

from __future__ import annotations

from studies.plan import GENERATED, Experiment, Study

# The recipe of the demo: which of four two-digit numbers is the largest, after one worked example. Learning rate, group
# size and β of gvpo-initial were chosen with GVPO on other seeds, before this study. All other algorithms have their
# own defaults, so this compares what people get who choose one by name, not the best that each can do.
LARGEST = Study(
    name="smollm2",
    title="Seven algorithms with SmolLM2-135M",
    model="smollm2-135m",
    data=GENERATED,
    settings={
        **{"data.name": "largest", "data.options": "{count: 4, digits: 2}", "data.val_size": "200"},
        **{"data.train_batch_size": "8", "rollout.group_size": "16", "rollout.max_tokens": "6"},
        **{"learner.lr": "3e-5", "learner.warmup_steps": "3"},
        **{"loop.total_steps": "30", "loop.save_every": "30", "eval.every": "10"},
    },
    experiments=(
        Experiment("grpo", {"algorithm": "grpo"}),
        Experiment("dr_grpo", {"algorithm": "dr_grpo"}),
        Experiment("rloo", {"algorithm": "rloo"}),
        Experiment("reinforce++", {"algorithm": "reinforce_plus_plus"}),
        Experiment("dapo", {"algorithm": "dapo"}),
        Experiment("gvpo-old", {"algorithm": "gvpo", "algorithm.reference": "old", "algorithm.beta": "0.1"}),
        # Answers have at most six tokens, so the nats to the start model cost little.
        Experiment("gvpo-initial", {"algorithm": "gvpo", "algorithm.reference": "initial", "algorithm.beta": "0.05"}),
    ),
    seeds=(0, 1, 2),
    metric="number",
)
