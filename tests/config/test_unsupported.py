"""Unsupported options are errors, all reported at once."""

from __future__ import annotations

import re

import pytest

from covey.config.aliases import translate
from covey.config.derive import UNSUPPORTED
from covey.errors import InputError

CALCULATOR = """
    algorithm.adv_estimator=grpo
    data.train_files=./data/rlhf/math/gsm8k_train.json
    data.val_files=./data/rlhf/math/gsm8k_test.json
    data.train_batch_size=64
    agent.agent_type=hf
    agent.tools=[calculator]
    agent.template=qwen2.5
    agent.model_name_or_path=Qwen/Qwen2.5-3B-Instruct
    agent.max_turns=3
    agent.reward_name=math_reward_string_equal
    agent.num_chains=8
    agent.use_agent=True
    actor_rollout_ref.actor.optim.lr=5e-7
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=mse
    actor_rollout_ref.actor.entropy_coeff=0.001
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.response_length=256
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    critic.model.path=Qwen/Qwen2.5-3B-Instruct
    algorithm.kl_ctrl.kl_coef=0.001
    trainer.logger=['console','wandb']
    trainer.project_name=AgentRL
    trainer.experiment_name=test_gsm8k
    trainer.n_gpus_per_node=1
    trainer.nnodes=1
    trainer.save_freq=50
    trainer.test_freq=10
    trainer.total_training_steps=100
"""


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.rollout.name=sglang",
        "rollout=hf",
        "agent.opponent=latest-2",
        "cluster=slurm",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    ],
)
def test_an_unsupported_option_is_an_error_with_a_fix(run, word):
    with pytest.raises(InputError) as error:
        run(word)
    first, second = str(error.value).splitlines()
    assert re.fullmatch(rf"not supported yet: .+  \({re.escape(word.partition('=')[0])}=.+\)", first)
    assert second.startswith("  ") and second.strip()


def test_a_check_reports_errors_as_warnings(run):
    """Not available, and not a term of the algorithm; the rest of the command still counts."""
    words = ["cluster=slurm", "env.reasoning=true", "rollout=sglang", "policy.kl_coef=0.1", "learner.lr=2e-5"]
    composed = run(*words, tolerant=True)
    config = composed.config
    assert (config.cluster.name, config.rollout.name, config.learner.lr) == ("local", "embedded", 2e-5)
    refused = [text for text in composed.warnings if text.startswith("a run would be refused: ")]
    assert len(refused) == len(composed.warnings) == 2
    assert "policy.kl_coef does not go with algorithm=gvpo" in refused[0]
    assert [key in refused[1] for key in ("cluster=slurm", "env.reasoning=true", "rollout=sglang")] == [True] * 3


def test_the_reasoning_prompt_is_more_than_a_system_prompt(run):
    with pytest.raises(InputError, match=r"data.system_prompt=.*another turn after a wrong answer: docs/environments"):
        run("env.reasoning=True")


def test_a_check_still_refuses_mistakes(run):
    for word in ("algorithm.gvpo_bta=0.2", "mode=asink", "learner.lr=fast"):
        with pytest.raises(InputError):
            run(word, tolerant=True)


def test_quoted_numbers_of_a_file_count_as_numbers(run):
    with pytest.raises(InputError, match=r"\(.*my.yaml, line 2: actor.ulysses_sequence_parallel_size=8\)"):
        run(file="env: {N_GPUS: 8}\nactor.ulysses_sequence_parallel_size: '${N_GPUS}'")


def test_the_calculator_command_runs(run):
    composed = run(*CALCULATOR.split())
    config = composed.config
    assert (config.agent.name, config.agent.tools, config.agent.max_turns) == ("hf", ["calculator"], 3)
    assert config.agent.template == "qwen2.5"
    assert config.algorithm.kl_coef == 0.001 and config.algorithm.kl_estimator == "mse"
    assert config.data.train_files == "./data/rlhf/math/gsm8k_train.json"
    assert config.reward.name == "math_reward_string_equal"
    assert (config.rollout.group_size, config.rollout.max_tokens) == (8, 256)
    assert (config.learner.mini_batch_size, config.learner.micro_batch_size) == (64, 8)
    assert (config.loop.save_every, config.eval.every, config.loop.total_steps) == (50, 10, 100)
    assert config.critic.model == "Qwen/Qwen2.5-3B-Instruct"
    assert (config.rollout.name, config.rollout.memory, config.rollout.tensor_parallel) == ("vllm", 0.5, 1)
    coef = "algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward=true"  # as it has none in verl
    assert composed.warnings == (coef,)


def test_the_table_has_one_way_to_ask_for_each_thing(algorithms):
    for row in UNSUPPORTED:
        assert translate(row.key, algorithms).key == row.key, "a row under an alias is never found"
