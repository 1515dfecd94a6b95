"""Studies of agents: tools on GSM8K, search over local passages, programs that are run, and instructions.

The two studies with tools begin with imitation (`covey sft`): a model of this size does not write valid calls by
itself. Demonstrations are made from training problems that are then not trained on. Nothing here was tuned: batch sizes
and learning rate are those of the studies on GSM8K, demonstrations and their learning rate those of docs/sft.md.
"""

from __future__ import annotations

from studies.mathematics import LARGE, SMALL
from studies.plan import Experiment, Study

# Fewer problems a step than without tools: an episode has several turns.
AGENTS = {
    **{"algorithm": "grpo", "data.train_batch_size": "32", "rollout.group_size": "8"},
    **{"rollout.max_sequences": "256", "rollout.memory": "0.1"},
    **{"learner.lr": "3e-6", "learner.warmup_steps": "5", "learner.micro_batch_tokens": "10240"},
    **{"loop.total_steps": "60", "loop.save_every": "20", "eval.every": "20"},
}
SFT = {
    **{"data.train_batch_size": "16", "learner.lr": "1e-5", "learner.micro_batch_tokens": "10240"},
    **{"loop.total_steps": "12", "loop.keep_last": "1", "eval.before": "false", "eval.after": "false"},
}


def _with_tool(tool: str, kind: str) -> Experiment:
    agent = {"agent": "hf", "agent.tools": f"[{tool}]", "agent.template": "qwen2.5", "agent.format": "hermes"}
    demonstrations = {"data.train_files": f"{{data}}/gsm8k-demos-{kind}.jsonl"}
    return Experiment(kind, agent, demonstrations=SFT | agent | demonstrations)


TOOLS = Study(
    name="agents-tools",
    title="A calculator or Python on GSM8K",
    model=SMALL,
    data="tools",
    settings=AGENTS
    | {
        "reward": "math_equal",
        **{"data.train_files": "{data}/gsm8k-rest.jsonl", "data.val_files": "{data}/gsm8k-test.jsonl"},
        # As the demonstrations, which follow the annotations of GSM8K's own solutions: up to eight calculations.
        **{"agent.max_turns": "8", "rollout.max_tokens": "200", "agent.max_response_tokens": "600"},
    },
    experiments=(_with_tool("calculator", "calculator"), _with_tool("python_executor", "python")),
    seeds=(0, 1),
    metric="math_equal",
)
REACT = {
    **{"agent": "react", "agent.tools": "[search]"},
    "agent.tool_options": "{search: {corpus: {data}/corpus.jsonl, top_k: 3}}",
}
SEARCH = Study(
    name="agents-search",
    title="ReAct with search over local passages",
    model=LARGE,  # 0.5B rarely reads an answer off three passages
    data="search",
    settings=AGENTS
    | {
        **{"reward": "qa_f1_reward", "data.train_batch_size": "16"},
        **{"data.train_files": "{data}/qa-train.jsonl", "data.val_files": "{data}/qa-test.jsonl"},
        **{"agent.max_turns": "5", "rollout.max_tokens": "128", "agent.max_tool_tokens": "400"},
    },
    experiments=(
        Experiment("react", REACT, demonstrations=SFT | REACT | {"data.train_files": "{data}/qa-demos.jsonl"}),
    ),
    seeds=(0, 1),
    metric="qa_f1_reward",
)
CODE = Study(
    name="agents-code",
    title="Programs for MBPP, run in the sandbox",
    model=SMALL,  # a model for code: no demonstrations
    data="code",
    settings=AGENTS
    | {
        # All hidden tests or nothing, as MBPP is scored.
        **{"reward": "code_reward", "reward.options": "{code_reward: {all: true}}"},
        **{"data.train_files": "{data}/mbpp-train.jsonl", "data.val_files": "{data}/mbpp-test.jsonl"},
        **{"rollout.max_tokens": "400", "sandbox.seconds": "5"},
    },
    experiments=(
        Experiment("one-answer", {}),
        # It may run its program and read the output, twice, before it answers. A ```python block is a call, so the
        # answer is asked for in a block of another name.
        Experiment(
            "runs-code",
            {
                **{"agent": "code", "agent.tools": "[python_executor]", "agent.max_turns": "3"},
                "data.system_prompt": '"Write and test your program in a block that begins with ```python. '
                'When it works, write the whole program again in a block that begins with ```final."',
            },
        ),
    ),
    seeds=(0, 1),
    metric="code_reward",
)
INSTRUCTIONS = Study(
    name="agents-ifeval",
    title="Instructions of kinds that were not trained on",
    model=SMALL,
    data="ifeval",
    # IFEval is one list of 541 prompts. Trained on: prompts without instructions on keywords or on the start and end;
    # tested on: 60 of such prompts that are held out (seen kinds), and all prompts with only those (unseen kinds).
    # Prompts that need language detection are left out, so that no further package is needed.
    settings=AGENTS
    | {
        "reward": "ifeval",
        **{"data.train_files": "{data}/ifeval-train.jsonl", "data.val_files": "{data}/ifeval-test.jsonl"},
        "rollout.max_tokens": "512",
    },
    experiments=(Experiment("grpo", {}),),
    seeds=(0, 1),
    metric="ifeval",
)
