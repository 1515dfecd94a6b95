"""Studies on a CPU, with the built-in SmolLM2-135M and generated tasks: an evening on two cores, without downloads."""

from __future__ import annotations

from studies.plan import GENERATED, Experiment, Study

# The recipe of the demo: which of four two-digit numbers is the largest, after one worked example. Learning rate, group
# size and β of gvpo-initial were chosen with GVPO on other seeds, before this study. All other algorithms have their
# own defaults, so this compares what people get who choose one by name, not the best that each can do.
LARGEST = Study(
    name="smollm2",
    title="Five algorithms with SmolLM2-135M",
    model="smollm2-135m",
    data=GENERATED,
    settings={
        **{"data.name": "largest", "data.options": "{count: 4, digits: 2}", "data.val_size": "200"},
        **{"data.train_batch_size": "8", "rollout.group_size": "16", "rollout.max_tokens": "6"},
        **{"learner.lr": "3e-5", "learner.warmup_steps": "3"},
        **{"loop.total_steps": "20", "loop.save_every": "20", "eval.every": "10"},
    },
    experiments=(
        Experiment("grpo", {"algorithm": "grpo"}),
        Experiment("rloo", {"algorithm": "rloo"}),
        Experiment("reinforce++", {"algorithm": "reinforce_plus_plus"}),
        Experiment("gvpo-old", {"algorithm": "gvpo", "algorithm.reference": "old", "algorithm.beta": "0.1"}),
        # Answers have at most six tokens, so the nats to the start model cost little.
        Experiment("gvpo-initial", {"algorithm": "gvpo", "algorithm.reference": "initial", "algorithm.beta": "0.05"}),
    ),
    seeds=(0, 1, 2),
    metric="number",
    timed=False,
)

# Sums of two numbers of two digits. The model imitates demonstrations that are worked in full (54 tokens, three of
# five), briefly (29) or not at all (8). Then it has three rewards with weight 1, as the GDPO scripts have: the right
# number, at most LIMIT tokens, which counts only for a right answer, and a boxed number, the easy one.
LIMIT = 40
DEMONSTRATIONS = {
    **{"data.train_files": "{data}/sums-demos.jsonl", "data.train_batch_size": "16", "learner.lr": "2e-5"},
    **{"loop.total_steps": "50", "loop.keep_last": "1", "eval.before": "false", "eval.after": "false"},
}
SUMS_REWARDS = Study(
    name="smollm2-rewards",
    title="SmolLM2-135M: right, short and well formed",
    model="smollm2-135m",
    data="sums",
    settings={
        **{"data.train_files": "{data}/sums-train.jsonl", "data.val_files": "{data}/sums-test.jsonl"},
        **{"reward": "[math_equal,length,format]", "reward.only_if": "{length: math_equal}"},
        "reward.options": f"{{length: {{max_tokens: {LIMIT}, zero_at: 1.0001}}}}",
        **{"data.train_batch_size": "8", "rollout.group_size": "8", "rollout.max_tokens": "80"},
        **{"learner.lr": "1e-5", "learner.warmup_steps": "3"},
        **{"loop.total_steps": "40", "loop.save_every": "40", "eval.every": "20"},
    },
    experiments=(
        Experiment("grpo", {"algorithm": "grpo"}, DEMONSTRATIONS),
        Experiment("gdpo", {"algorithm": "gdpo"}, DEMONSTRATIONS),
        # The scripts' values, with both warm-ups scaled to 40 steps instead of 500.
        Experiment(
            "dgdo",
            {
                "algorithm": "dgdo",
                **{"algorithm.beta": "0.9", "algorithm.beta_start": "0.5", "algorithm.min_weight": "0.15"},
                **{"algorithm.warmup_steps": "4", "algorithm.beta_warmup_steps": "16"},
            },
            DEMONSTRATIONS,
        ),
    ),
    seeds=(0, 1, 2),
    metric="math_equal",
    limit=LIMIT,
    compare_all=True,
    timed=False,
)
