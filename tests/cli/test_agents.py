"""Agents through the command line: the commands of other projects' guides, on real data, with a tiny model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.sandbox import describe

SMALL = (
    "trainer.total_training_steps=2 data.train_batch_size=2 data.train_size=4 data.val_size=2 loop.save_final=false "
    "actor_rollout_ref.rollout.response_length=24 actor_rollout_ref.actor.ppo_mini_batch_size=2 model.device=cpu "
    "model.context_length=65536"
)
SHARED = (
    "agent.use_agent=True actor_rollout_ref.actor.optim.lr=5e-7 actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=mse "
    "actor_rollout_ref.actor.entropy_coeff=0.001 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['console'] "
    "trainer.n_gpus_per_node=1 trainer.nnodes=1"
)
COMMANDS = {
    "calculator": (
        "algorithm.adv_estimator=grpo data.train_files=gsm8k.jsonl data.val_files=gsm8k.jsonl agent.agent_type=hf "
        "agent.tools=[calculator] agent.template=qwen2.5 agent.max_turns=3 agent.num_chains=4 "
        "agent.reward_name=math_reward_string_equal"
    ),
    "react": (
        "algorithm.adv_estimator=reinforce_plus_plus data.train_files=qa.jsonl data.val_files=qa.jsonl "
        "agent.agent_type=react agent.tools=[search,answer] agent.tool_options.search.corpus=corpus.jsonl "
        "agent.max_turns=4 agent.reward_name=qa_f1_reward agent.num_chains=1"
    ),
    "code": (
        "algorithm.adv_estimator=grpo data.train_files=mbpp.jsonl data.val_files=mbpp.jsonl agent.agent_type=code "
        "agent.tools=[python_executor] agent.max_turns=5 agent.reward_name=code_reward agent.num_chains=4"
    ),
}


@pytest.fixture
def data(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few rows of each data set, in a folder of their own."""

    def rows(name: str, count: int) -> list[dict[str, object]]:
        with (shared / "data" / name).open() as lines:
            return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]

    def write(name: str, found: list[dict[str, object]]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in found))

    write("gsm8k.jsonl", rows("gsm8k/train.jsonl", 6))
    write("qa.jsonl", rows("qa/questions.jsonl", 6))
    write("corpus.jsonl", rows("qa/corpus.jsonl", 40))
    write(
        "mbpp.jsonl", [{"question": row["text"], "test_list": row["test_list"]} for row in rows("code/mbpp.jsonl", 6)]
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_guide_trains(name: str, data: Path, tiny_model_folder: Path) -> None:
    if name == "react":
        pytest.importorskip("bm25s", reason="needs the extra covey[search]")
    if name == "code" and not any(finding.works for finding in describe() if not finding.tier.weak):
        pytest.skip("no sandbox that isolates works here")
    words = shlex.split(f"{SMALL} {SHARED} {COMMANDS[name]}")
    assert main(["train", f"model={tiny_model_folder}", *words]) == 0
    (path,) = data.glob("outputs/*/*/metrics.jsonl")
    steps = [r["metrics"] for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "step"]
    assert len(steps) == 2
    assert all(step["episodes/failed"] == 0 and step["episodes/total"] in (2, 8) for step in steps)


def test_a_search_engine_asks_for_its_key(
    data: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    words = shlex.split(f"{SMALL} {COMMANDS['react']}".replace("[search,answer]", "[google_search,answer]"))
    words = [word for word in words if "tool_options" not in word]
    assert main(["train", f"model={tiny_model_folder}", *words]) == 2
    assert "SERPER_API_KEY" in capsys.readouterr().err


def test_a_misspelt_tool_is_told_before_the_model_loads(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"model={tiny_model_folder}", "agent=hf", "agent.tools=[calculater]"]) == 2
    text = capsys.readouterr().err
    assert "unknown tool  calculater" in text and "did you mean   calculator?" in text


def test_an_episode_is_shown_token_by_token(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.py").write_text(
        "async def twice(policy, task):\n"
        "    draft = await policy.chat(task.messages)\n"
        "    reply = {'role': 'assistant', 'content': draft}\n"
        "    return await policy.chat([*task.messages, reply, {'role': 'user', 'content': 'sure?'}])\n"
    )
    words = ["agent=twice.py:twice", "data=sort", "rollout.max_tokens=4", "--tasks", "1", "-n", "1"]
    assert main(["sample", str(tiny_model_folder), *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("⟦") == shown.count("⟧") == 2
    before, _, after = shown.partition("sure?")
    assert before.count("⟦") == 1 and after.count("⟦") == 1
    assert "response tokens sampled" in shown
