"""A study in seconds on a CPU: a random model with a character tokenizer, a few made-up tasks in the form of the public
files, few steps, and rewards that a random model can earn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from studies.plan import Experiment, Settings, Study

REWARDS = Path(__file__).parent / "tiny_rewards.py"
EARNED = ("math_equal", "qa_f1_reward", "code_reward", "ifeval")  # replaced by rewards of the same name
LESS = {
    **{"data.train_batch_size": "2", "rollout.group_size": "4", "rollout.max_tokens": "8"},
    **{"rollout.max_sequences": "8", "loop.total_steps": "4", "loop.save_every": "1", "eval.every": "2"},
    **{"learner.lr": "1e-2", "learner.warmup_steps": "0", "loop.threads": "1"},
}
LESS_IF_GIVEN = {"agent.max_turns": "2", "agent.max_response_tokens": "16", "algorithm.beta_warmup_steps": "2"}
SFT = {"data.train_batch_size": "2", "loop.total_steps": "2", "loop.threads": "1"}


def shrunk(study: Study) -> Study:
    experiments = tuple(
        Experiment(one.name, _less(one.settings), demonstrations=one.demonstrations and {**one.demonstrations, **SFT})
        for one in study.experiments
    )
    settings = {**_less(study.settings), **LESS}
    return replace(study, settings=settings, experiments=experiments, limit=study.limit and 6)


def _less(settings: Settings) -> dict[str, str]:
    less = {key: LESS_IF_GIVEN.get(key, value) for key, value in settings.items()}
    if "algorithm.warmup_steps" in less:
        less["algorithm.warmup_steps"] = "1"
    for key in ("agent.template", "agent.format"):
        less.pop(key, None)
    if "reward" in less:
        less["reward"] = tiny_reward(less["reward"])
    if "code_reward" in less.get("reward.options", ""):
        del less["reward.options"]
    return less


def tiny_reward(names: str) -> str:
    found = [f"{REWARDS}:{name}" if name in EARNED else name for name in names.strip("[]").split(",")]
    return found[0] if len(found) == 1 else f"[{','.join(found)}]"


def make_model(folder: Path) -> Path:
    """A random Llama with a token for each character and ChatML's template. It is made once."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    marks = ["<unk>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: n for n, token in enumerate([*marks, "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": len(wrapped), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
        **{"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None},
        **{"eos_token_id": wrapped.eos_token_id, "pad_token_id": wrapped.pad_token_id},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


# -- Tasks in the form of the public files ----------------------------------------------------------------------------


def make_source(folder: Path) -> Path:
    for name, rows in _sources().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _sources() -> Mapping[str, list[dict[str, Any]]]:
    sums = [
        {"question": f"Ann has {n} nuts and finds 2.", "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"}
        for n in range(12)
    ]
    questions = [
        {
            **{"id": f"{name}-{split}-{n}", "dataset": name, "split": split, "gold_complete": True},
            **{"question": f"Which city has {n} towers?", "answers": ["Oslo"], "gold_passage_ids": ["p0"]},
        }
        for name in ("hotpotqa", "musique", "2wikimultihopqa")
        for split in ("train", "dev")
        for n in range(2)
    ]
    programs = [
        {
            **{"task_id": n, "text": f"Add {n}.", "code": f"def f(x): return x + {n}", "test_setup_code": ""},
            **{"test_list": [f"assert f(1) == {n + 1}"], "challenge_test_list": []},
        }
        for n in (*range(11, 15), *range(601, 609))
    ]
    kinds = ["punctuation:no_comma", "keywords:frequency", "punctuation:no_comma", "startend:quotation"]
    given = {"keywords:frequency": {"keyword": "a", "frequency": 1, "relation": "at least"}}
    prompts = [
        {
            "key": n,
            "prompt": f"Say {n}.",
            "instruction_id_list": [kinds[n % 4]],
            "kwargs": [given.get(kinds[n % 4], {})],
        }
        for n in range(16)
    ]
    return {
        "gsm8k/train.jsonl": sums,
        "gsm8k/test.jsonl": [{"question": f"Bob eats {n} figs.", "answer": f"#### {n}"} for n in range(4)],
        "math_eval/math500.jsonl": [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)],
        "qa/questions.jsonl": questions,
        "qa/corpus.jsonl": [{"id": "p0", "title": "Oslo", "text": "A city.", "src": "x"}],
        "code/mbpp.jsonl": programs,
        "ifeval/input_data.jsonl": prompts,
    }
