"""Self-play against past policies: who plays which role with which weights, and that a resumed run continues alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey
from covey.app.resume import best_model
from covey.errors import InputError
from covey.types import Task

TASKS = [{"question": f"say {letter}", "answer": letter} for letter in "abcd"]
SETTINGS: dict[str, Any] = {
    "data.train_batch_size": 2,
    "rollout.group_size": 4,
    "rollout.max_tokens": 4,
    "learner.lr": 1e-2,
    "loop.threads": 1,
    "agent.opponents": ["second"],
    "agent.opponent_options": {"every": 2, "keep": 2},
    "resume": "disable",
    "logging.to": [],
    "logging.episodes_per_step": 64,
    "eval.before": False,
}


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token ends a reply: an untrained model ends no reply by itself."""
    from transformers import AutoConfig, GenerationConfig

    folder = tmp_path_factory.mktemp("talks") / "model"
    shutil.copytree(tiny_model_folder, folder)
    ends = list(range(AutoConfig.from_pretrained(folder).vocab_size))
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    return folder


class Duel:
    """Two players, one turn each; the longer word wins."""

    def reset(self, task: Task) -> Any:
        self.said: list[str] = []
        return covey.Observation(f"begin with {task.answer}", role="first")

    def step(self, reply: str) -> Any:
        self.said.append(reply)
        if len(self.said) == 1:
            return covey.Observation("your turn", role="second")
        return self.result()

    def end(self, reason: str) -> Any:
        return self.result()

    def result(self) -> Any:
        won = sum(map(ord, self.said[0])) / 100.0
        return covey.Done(reward={"first": won, "second": -won})


@covey.agent
async def duel(policy: Any, task: Task) -> str:
    """The same in this process: the second player continues the first one's conversation, in one row of tokens."""
    first = await policy.ask(task.messages, role="first")
    messages = [*task.messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and you?"}]
    second = await policy.ask(messages, role="second")
    return str(first.text + second.text)


@covey.reward
def loud(episode: Any, final_answer: str) -> dict[str, float]:
    score = sum(map(ord, final_answer)) / 100.0
    return {"first": score, "second": -score}


def trainer(model: Path, folder: Path, *, agent: Any = Duel, **changes: Any) -> covey.Trainer:
    reward = {"reward": loud} if agent is duel else {}
    settings = SETTINGS | {"logging.output_dir": str(folder / "runs"), "loop.total_steps": 5} | changes
    return covey.Trainer(model=str(model), tasks=TASKS, agent=agent, algorithm="grpo", **reward, **settings)


def train(model: Path, folder: Path, **changes: Any) -> Any:
    with trainer(model, folder, **changes) as opened:
        return opened.train()


def test_the_pool_has_every_nth_policy_the_last_few_and_the_first(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, **{"loop.total_steps": 7})
    files = sorted(path.name for path in (run.path / "opponents").iterdir())
    assert files == [f"version-{step}.safetensors" for step in (0, 4, 6)]
    start, last = (load_file(run.path / "opponents" / files[i]) for i in (0, 2))
    given = load_file(model / "model.safetensors")
    for name, weight in start.items():
        torch.testing.assert_close(weight, given[name], rtol=0, atol=0)
    assert any(not torch.equal(weight, start[name]) for name, weight in last.items())
    versions = [metrics["opponent/version"] for metrics in run.metrics]
    allowed = [{0}, {0}, {0, 2}, {0, 2}, {2, 4}, {2, 4}, {4, 6}]
    assert all(version in pool for version, pool in zip(versions, allowed, strict=True))
    assert [m["opponent/age"] for m in run.metrics] == [m["step"] - m["opponent/version"] for m in run.metrics]


@pytest.mark.parametrize("agent", [Duel, duel])
def test_the_opponents_tokens_are_those_of_its_policy_and_not_trained(model: Path, tmp_path: Path, agent: Any) -> None:
    """Log-probs of every turn, recomputed by plain forward passes of the policy that the metrics name."""
    from transformers import AutoModelForCausalLM

    options = {"every": 1, "keep": 50}
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    with trainer(model, tmp_path, agent=agent, **{"agent.opponent_options": options, "loop.total_steps": 4}) as run:
        steps = list(run)
    assert any(step.metrics["opponent/age"] > 0 for step in steps)
    for step in steps:
        versions = {"first": step.index, "second": int(step.metrics["opponent/version"])}
        for turn in (turn for group in step.groups for episode in group.episodes for turn in episode.turns):
            weights = load_file(run.path / "opponents" / f"version-{versions[turn.role]}.safetensors")
            plain.load_state_dict(weights)
            with torch.no_grad():
                logprobs = plain(torch.tensor([turn.prompt_ids])).logits[0, -1].log_softmax(-1)
            assert turn.logprobs == (pytest.approx(float(logprobs[turn.completion_ids[0]]), abs=1e-4),)
            assert turn.versions == (versions[turn.role],)
            assert turn.trained == (turn.role == "first")
        assert step.metrics["role/first/episodes"] == 8 and "role/second/reward" not in step.metrics


@pytest.mark.parametrize("agent", [Duel, duel])
def test_a_resumed_run_plays_the_same_opponents(model: Path, tmp_path: Path, agent: Any) -> None:
    """With the same tokens and weights, bit for bit, if the agent runs in this process. Replies of a worker arrive at
    other times in every run, so they are sampled in other batches, and rounding differs."""
    settings = {"loop.save_every": 3, "loop.total_steps": 6, "resume": "auto", "eval.every": 2, "validation": TASKS}
    whole = train(model, tmp_path / "whole", agent=agent, **settings)
    with trainer(model, tmp_path / "cut", agent=agent, **settings) as killed:
        for step in killed:
            if step.index == 4:  # after the checkpoint, and after a later policy joined the pool
                break
    cut = train(model, tmp_path / "cut", agent=agent, **settings)
    assert cut.first_step == 3 and cut.path == killed.path

    def losses(run: Any) -> list[dict[str, float]]:
        keys = ("opponent/version", "reward/mean", "optim/grad_norm", "loss/policy", "policy/entropy")
        return [{key: m[key] for key in keys if key in m} for m in run.metrics]

    assert [m["opponent/version"] for m in cut.metrics] == [m["opponent/version"] for m in whole.metrics]
    if agent is duel:
        assert losses(cut) == losses(whole)
        one, other = (load_file(run.path / "checkpoints/step-000006/model/model.safetensors") for run in (whole, cut))
        assert all(torch.equal(one[name], other[name]) for name in one)
    pools = [sorted(path.name for path in (run.path / "opponents").iterdir()) for run in (whole, cut)]
    assert pools[0] == pools[1] == [f"version-{n}.safetensors" for n in (0, 4, 6)]


def test_a_checkpoint_has_the_pool(model: Path, tmp_path: Path) -> None:
    """A new run at a checkpoint plays the same opponents, in its own folder."""
    run = train(model, tmp_path, agent=duel, **{"loop.save_every": 3, "loop.total_steps": 6})
    checkpoint = run.path / "checkpoints" / "step-000003"
    named = json.loads((checkpoint / "manifest.json").read_text())
    assert [name for name in named if "opponents" in name] == [f"opponents/version-{n}.safetensors" for n in (0, 2)]
    branch = train(model, tmp_path, agent=duel, **{"resume": str(checkpoint), "loop.total_steps": 6})
    assert branch.path != run.path
    assert [m["opponent/version"] for m in branch.metrics[3:]] == [m["opponent/version"] for m in run.metrics[3:]]
    assert [m["reward/mean"] for m in branch.metrics[3:]] == [m["reward/mean"] for m in run.metrics[3:]]


def test_evaluations_play_against_the_first_policy(model: Path, tmp_path: Path) -> None:
    """The second player answers alike in every evaluation; what counts is the first player's reward."""

    class Watched(Duel):
        def result(self) -> Any:
            return covey.Done(reward={"first": float(ord(self.said[0])), "second": float(ord(self.said[1]))})

    run = train(
        model,
        tmp_path,
        agent=Watched,
        **{"eval.every": 1, "eval.before": True, "validation": TASKS, "loop.total_steps": 3, "learner.lr": 0.1},
    )
    assert len(run.evaluations) == 4
    seconds = {metrics["eval/greedy/given/second"] for _, metrics in run.evaluations}
    assert len(seconds) == 1
    assert len({metrics["eval/greedy/given/first"] for _, metrics in run.evaluations}) > 1
    for _, metrics in run.evaluations:
        assert metrics["eval/accuracy"] == metrics["eval/greedy/given/first"]


@pytest.mark.parametrize("trained", ["both", "second"])
def test_without_opponents_the_rewards_of_all_trained_roles_cancel(model: Path, tmp_path: Path, trained: str) -> None:
    """So no evaluation is better than another, and there is no best checkpoint: a run's model is its last one. If one
    role is trained, its reward counts."""
    settings = {"agent.opponents": [], "agent.opponent_options": {}, "eval.every": 1, "eval.before": True}
    settings |= {"agent.train_roles": [trained] if trained != "both" else [], "validation": TASKS}
    run = train(model, tmp_path, **settings, **{"loop.save_every": 1, "loop.total_steps": 2})
    state = json.loads((run.path / "checkpoints/step-000002/state.json").read_text())
    for _, metrics in run.evaluations:
        assert metrics["eval/greedy/given"] == pytest.approx(0)
        assert metrics.get("eval/accuracy") == (metrics["eval/greedy/given/second"] if trained == "second" else None)
    if trained == "both":
        assert state["best"] is None and best_model(run.path).parent.name == "step-000002"
    else:
        assert state["best"]["value"] == max(m["eval/accuracy"] for n, m in run.evaluations if n > 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent.opponent_options": {"evry": 2}}, "did you mean   every"),
        ({"agent.opponent_options": {"draw": "last"}}, "unknown value of agent.opponent_options.draw"),
        ({"agent.opponent_options": {"every": 0}}, "agent.opponent_options.every"),
        ({"agent.train_roles": ["second"]}, "both name second"),
        ({"mode": "async"}, "does not support mode=async"),
        ({"agent.opponents": []}, "has no effect without agent.opponents"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(model, tmp_path, **changes)
    assert not (tmp_path / "runs").exists()


def test_an_agent_without_roles_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="agent=chat has no roles"):
        covey.train(
            model=str(model),
            tasks=TASKS,
            reward="exact",
            **(SETTINGS | {"logging.output_dir": str(tmp_path), "loop.total_steps": 1}),
        )


def test_a_role_that_nobody_has_is_warned_about(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"agent.opponents": ["secnd"], "loop.total_steps": 1, "logging.to": ["console"]}
    train(model, tmp_path, **changes)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "agent.opponents names the role secnd, which was not seen so far: the turns have the roles first, second"
        in (shown)
    )


def test_adapters_share_the_base_weights(model: Path, tmp_path: Path) -> None:
    from covey.app.models import copy_policy
    from covey.config.schema import LoraConfig, ModelConfig
    from covey.models.loading import load_policy, open_source

    pytest.importorskip("peft")
    config = ModelConfig(name=str(model), lora=LoraConfig(rank=2))
    policy = load_policy(open_source(config), config)
    copied = copy_policy(policy)
    ours, theirs = dict(policy.named_parameters()), dict(copied.named_parameters())
    assert {name for name in ours if ours[name] is not theirs[name]} == {n for n, w in ours.items() if w.requires_grad}
    run = train(model, tmp_path, **{"model.lora.rank": 2, "loop.total_steps": 3})
    (first, *_) = sorted((run.path / "opponents").iterdir())
    assert all("lora_" in name for name in load_file(first))
