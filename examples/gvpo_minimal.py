"""GVPO on existing answers, for any pair of Hugging Face causal models.

    python examples/gvpo_minimal.py [MODEL]

MODEL is a folder or a Hugging Face id; without it the built-in SmolLM2-135M is used.
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import GVPOTrainer, model_path


def reward_function(prompt: str, completion: str) -> float:
    """Put your verifier or reward model here."""
    return float(completion.strip().startswith("4"))


def main() -> None:
    name = model_path(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(name)
    ref_model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    trainer = GVPOTrainer(
        model=model,
        ref_model=ref_model,
        tokenizer=tokenizer,
        beta=0.1,
        num_samples_per_prompt=4,
        lr=1e-5,
        reward_function=reward_function,
    )
    prompts = ["Solve: 2 + 2 = ?"]
    completions = [["4", "Four", "2+2=4", "The answer is 4"]]
    for step in range(5):
        metrics = trainer.train_step(prompts, completions)
        print(f"step {step}  " + "  ".join(f"{name}={metrics[name]:.4f}" for name in SHOWN))


SHOWN = ("gvpo/loss", "gvpo/mean_reward", "gvpo/std_weight", "gvpo/mean_log_ratio", "grad/norm")

if __name__ == "__main__":
    main()
