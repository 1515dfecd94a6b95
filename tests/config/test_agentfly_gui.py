"""The training script of AgentFly's gui agent, with `covey train` in place of its entry point."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from covey.algorithms import algorithm_schemas, schema
from covey.cli.main import main
from covey.config import compose
from covey.telemetry.jsonl import read_episodes
from tests.vision.tiny import drawn, vlm_folder

# examples/train_scripts/run_gui_agent.sh of AgentFly, with its variables filled in.
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
COMMAND = f"""
    algorithm.adv_estimator=grpo
    data.train_files=data/rlhf/gui/gui_r1_train.parquet
    data.val_files=data/rlhf/gui/gui_r1_test.parquet
    data.val_batch_size=512
    data.train_batch_size=64
    agent.use_agent=True
    agent.init_config.agent_type=gui
    agent.init_config.template=qwen2.5-vl
    agent.init_config.model_name_or_path={MODEL}
    agent.init_config.reward_name=gui_reward
    agent.init_config.tools=[pyautogui_code_generator]
    agent.generation_config.max_tokens=512
    agent.max_turns=4
    agent.num_chains=8
    actor_rollout_ref.model.path={MODEL}
    actor_rollout_ref.actor.optim.lr=4e-7
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=mse
    actor_rollout_ref.actor.entropy_coeff=0.01
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    critic.model.path={MODEL}
    critic.ppo_mini_batch_size=4
    critic.ppo_micro_batch_size_per_gpu=1
    algorithm.kl_ctrl.kl_coef=0.001
    trainer.critic_warmup=0
    "trainer.logger=['console','wandb']"
    trainer.project_name=Open
    trainer.experiment_name=gui_agent
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.save_freq=50
    trainer.test_freq=10
    trainer.total_training_steps=200
    trainer.val_before_train=False
"""


def test_its_settings_are_read() -> None:
    words = shlex.split(COMMAND)
    config = compose(words, algorithms=algorithm_schemas(), own_algorithm=schema).config
    assert config.agent.name == "gui" and config.agent.tools == ["pyautogui_code_generator"]
    assert config.agent.template == "qwen2.5-vl" and config.model.name == MODEL
    assert config.reward.name == "gui_reward" and config.rollout.max_tokens == 512
    assert config.rollout.group_size in (4, 8) and config.learner.lr == 4e-7


def test_the_command_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the model is not looked up
    assert main(["train", "--validate-only", *shlex.split(COMMAND)]) == 0
    assert "the settings are valid" in capsys.readouterr().out


def test_the_command_runs_with_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the changes that docs/guides/from-agentfly.md names, another model and less of everything."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "question": "<image>Open the menu.",
            "images": [{"bytes": drawn(48, 32, seed=n), "path": None}],
            "gt_action": "click",
            "gt_bbox": [2.0, 2.0, 20.0, 20.0],
            "gt_input_text": "no input text",
        }
        for n in range(4)
    ]
    folder = tmp_path / "data/rlhf/gui"
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"gui_r1_{name}.parquet")
    model = vlm_folder(tmp_path / "model", "qwen2_5_vl")
    changes = {
        "actor_rollout_ref.rollout.name": "embedded",
        "trainer.n_gpus_per_node": "1",
        "trainer.logger": "['console']",
        "data.train_batch_size": "2",
        "data.val_batch_size": "2",
        "agent.generation_config.max_tokens": "6",
        "agent.num_chains": "2",
        "actor_rollout_ref.rollout.n": "2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
        "trainer.total_training_steps": "2",
    }
    words = []
    for word in shlex.split(COMMAND.replace(MODEL, str(model))):
        key, _, value = word.partition("=")
        words.append(f"{key}={changes.get(key, value)}")
    assert main(["train", *words]) == 0, capsys.readouterr().err
    (run,) = Path("outputs").glob("*/*")
    episodes = list(read_episodes(run / "episodes.jsonl"))
    assert len({episode["step"] for episode in episodes}) == 2
    assert all(set(episode["rewards"]) >= {"gui_reward"} for episode in episodes)
