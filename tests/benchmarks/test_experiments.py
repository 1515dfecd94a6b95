"""The learning experiments of benchmarks/: their exact mathematics, and that each runs from end to end."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import covey
from covey.telemetry import read_episodes
from covey.types import Task


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    import tiny

    folder: Path = tiny.make_model(tmp_path / "model", "abcdefg", seed=3, initializer_range=0.5)
    return folder


@pytest.fixture
def question(model_folder: Path) -> Any:
    import gvpo_optimum as experiment

    rewards = [experiment.score(experiment.read(answer), "ee") for answer in experiment.all_answers()]
    return experiment.Question(torch.tensor(rewards, dtype=torch.float64), experiment.load(model_folder)[1])


def test_every_answer_is_there_once() -> None:
    import gvpo_optimum as experiment

    answers = experiment.all_answers()
    assert len(set(answers)) == len(answers) == 1 + 7 + 7**2 + 7**3
    assert (0,) in answers and (1, 7, 0) in answers and (2, 2, 2) in answers and (2, 2, 2, 0) not in answers
    assert len({experiment.read(answer) for answer in answers}) == len(
        answers
    )  # so a reward of the text is one of them


def test_the_probabilities_of_all_answers_sum_to_one(model_folder: Path) -> None:
    import gvpo_optimum as experiment

    for logprobs_A in experiment.load(model_folder):
        assert float(logprobs_A.exp().sum()) == pytest.approx(1, abs=1e-12)


def test_the_enumeration_knows_what_the_sampler_does(model_folder: Path, tmp_path: Path) -> None:
    """Log-probs of sampled answers, as the engine reports them, against the table: end token and length limit."""
    import gvpo_optimum as experiment

    run = covey.train(
        model=str(model_folder),
        tasks=[{"question": q, "answer": "b"} for q in "abcd"],
        reward=experiment.agreement,
        algorithm="rloo",
        rollout={"group_size": 16, "max_tokens": experiment.MOST},
        loop={"total_steps": 1, "save_final": False},
        logging={"to": [], "output_dir": str(tmp_path / "runs"), "episodes_per_step": 64},
    )
    tables = dict(zip("abcd", experiment.load(model_folder), strict=True))
    answers, stops = experiment.all_answers(), set()
    for episode in read_episodes(run.path / "episodes.jsonl"):
        (row,) = episode["rows"]
        known = tables[row["prompt_text"]][answers.index(tuple(row["response_ids"]))]
        assert sum(row["logprobs"]) == pytest.approx(float(known), abs=1e-4)
        stops.add(episode["stop"])
    assert stops == {"eos", "length"}


def test_the_optimum_solves_its_equation(question: Any) -> None:
    """log π* − log π_ref − R/β is the same for every answer, and no nearby policy has more E[R] − β KL."""
    import gvpo_optimum as experiment

    beta = 0.2
    best_A = experiment.optimum(question, beta)
    rest_A = best_A - question.reference_A - question.rewards_A / beta
    assert float(rest_A.max() - rest_A.min()) < 1e-10
    assert float(best_A.exp().sum()) == pytest.approx(1, abs=1e-12)

    def objective(policy_A: torch.Tensor) -> float:
        found = experiment.measure([policy_A], [question], beta)
        return float(found.reward - beta * found.kl)

    assert objective(best_A) == pytest.approx(-beta * float(rest_A.mean()), abs=1e-10)  # β log of the normaliser
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise_A = 0.1 * torch.randn(len(best_A), generator=generator, dtype=torch.float64)
        assert objective(torch.log_softmax(best_A + noise_A, 0)) < objective(best_A)


def test_the_distance_to_the_optimum(question: Any) -> None:
    import gvpo_optimum as experiment

    best_A = experiment.optimum(question, 0.1)
    assert experiment.measure([best_A], [question], 0.1).variation == 0
    certain_A = torch.full_like(best_A, -1e3)
    certain_A[5] = 0.0  # one answer with certainty: what it lacks elsewhere is 1 − π*(5)
    assert experiment.measure([certain_A], [question], 0.1).variation == pytest.approx(1 - math.exp(best_A[5]))


def test_agreement_counts_places() -> None:
    import gvpo_optimum as experiment

    for text, wanted, share in [
        ("bcd", "bcd", 1),
        ("ee", "ee", 1),
        ("eea", "ee", 2 / 3),
        ("e", "ee", 2 / 3),
        ("", "c", 2 / 3),
    ]:
        assert experiment.score(text, wanted) == pytest.approx(share)


@pytest.mark.slow
def test_gvpo_optimum_runs() -> None:
    import gvpo_optimum as experiment

    outcomes = [experiment.train(name, 0.2, 100, steps=4, every=2) for name in ("gvpo", "grpo")]
    for outcome in outcomes:
        assert list(outcome.course) == [0, 2, 4]
        assert outcome.course[0].kl == 0 and outcome.last.kl > 0
        assert all(math.isfinite(x) for f in outcome.course.values() for x in (f.reward, f.kl, f.variation))
    assert experiment.ends(outcomes).count("\n") == 3 and experiment.courses(outcomes).count("\n") == 5


@pytest.mark.slow
def test_two_rewards_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import two_rewards as experiment

    monkeypatch.setattr(experiment, "ANSWERS", 4)
    monkeypatch.setitem(experiment.ALGORITHMS, "dgdo", {"warmup_steps": 2, "beta_warmup_steps": 2})
    outcomes = [experiment.train(name, 100, experiment.PRICE, steps=4) for name in experiment.ALGORITHMS]
    for outcome in outcomes:
        assert outcome.before == outcomes[0].before  # they start alike
        assert 0 <= outcome.worst <= 1
    assert len(outcomes[-1].weights) == 2 and outcomes[-1].weights[-1] != 0.5  # DGDO weighs after its warm-up
    assert "| GDPO − GRPO |" in experiment.report(outcomes)


def test_the_rewards_conflict() -> None:
    """On the front of best answers, n right letters, the sum is 1 whatever n is."""
    import two_rewards as experiment

    brevity = experiment.brevity(experiment.PRICE)
    for n in range(9):
        assert experiment.recall("ijklmnop"[:n], "ijklmnop") + brevity("ijklmnop"[:n]) == 1
    assert experiment.recall("iiab", "ijklmnop") == 1 / 8 and brevity("iiab") == 1 / 2


def test_counting_is_right_in_any_symbols() -> None:
    import gvpo_anchor as experiment

    assert experiment.count(3, 9, 4) == [2, 5, 8, 1]
    assert {"question": "39", "answer": "2581"} in experiment.questions(4) and len(experiment.questions(4)) == 30
    answers = [SimpleNamespace(final_answer=text) for text in ("2581", "c5IB", "c5I", "c5IC", "")]
    assert experiment.right(answers, "2581") == [1, 1, 0, 0, 0]
    slipped = experiment.count(3, 9, 1000, 0.5, random.Random(0))
    steps = [(after - before) % 10 for before, after in itertools.pairwise([9, *slipped])]
    assert 0.4 < sum(step != 3 for step in steps) / 1000 < 0.5  # a tenth of the slips writes the right digit


def test_the_table_of_anchors_compares_seed_by_seed() -> None:
    import gvpo_anchor as experiment

    def outcome(arm: str, seed: int, average: float, after: float) -> Any:
        return experiment.Outcome("short", arm, seed, 0.3, average, after, 1.0, math.nan, math.nan, math.nan, 60.0)

    found = [outcome("grpo", seed, 0.5, 0.6 + seed / 10) for seed in (0, 1)]
    found += [outcome("old", seed, 0.5 + seed / 10, 0.7 + seed / 10) for seed in (0, 1)]
    text = experiment.report(found, "short")
    assert "| old | 0.550 | 0.750 | +0.050 ± 0.635 | +0.100 ± 0.000 | 1.00 |  |  |" in text


def test_the_walk_pays_for_progress() -> None:
    """What is paid sums to the cells that were gained; the same walk paid at the end gives 1 for arriving."""
    import turn_credit as experiment

    assert len({experiment.moves("a", cell) for cell in range(6)}) > 1  # each cell has its own letters
    task = Task("a", ({"role": "user", "content": "a"},), answer="a")
    walk, late = experiment.Walk(), experiment.PaidAtTheEnd()
    assert (walk.reset(task).state, late.reset(task).state) == (0, 0)
    ahead, back = experiment.moves("a", 0)
    assert walk.step(back).reward == 0  # nothing lies behind the first cell
    assert walk.step(ahead).reward == pytest.approx(1 / 6)
    ahead, back = experiment.moves("a", 1)
    assert walk.step("a").state == 1  # not a letter of the walk
    lost = walk.step(back)
    assert lost.reward == pytest.approx(-1 / 6) and (lost.state, lost.content) == (0, "0")
    paid = 0.0
    for cell in range(6):
        result, at_end = walk.step(experiment.moves("a", cell)[0]), late.step(experiment.moves("a", cell)[0])
        if cell < 5:
            assert at_end.reward is None
            paid += result.reward
    assert paid + result.reward["reward"] == pytest.approx(1) and at_end.reward == {"reward": 1.0, "arrived": 1.0}


def test_sign_test() -> None:
    import two_rewards as experiment

    assert experiment.sign_test([1.0] * 10) == pytest.approx(2 / 1024)
    assert experiment.sign_test([1, 1, 1, -1, 0]) == pytest.approx(2 * 5 / 16)
    assert experiment.sign_test([1, -1]) == 1


def test_a_section_is_replaced_between_its_marks(tmp_path: Path) -> None:
    import tiny

    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: begin -->\nold \\1\n<!-- x: end -->\nb <!-- y: begin --> <!-- y: end -->\n")
    tiny.write_section("x", "new \\1", page)
    assert page.read_text() == (
        "a\n<!-- x: begin -->\n\nnew \\1\n\n<!-- x: end -->\nb <!-- y: begin --> <!-- y: end -->\n"
    )
    with pytest.raises(AssertionError, match="needs the marks"):
        tiny.write_section("z", "new", page)


def test_exploitability_and_the_reward_of_mixed_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    import self_play as experiment

    even, rock = dict.fromkeys("rps", 1 / 3), {"r": 1.0}
    assert experiment.exploitability(even) == pytest.approx(0)
    assert experiment.exploitability(rock) == 1  # paper
    assert experiment.exploitability({"r": 0.5, "p": 0.5}) == pytest.approx(0.5)  # paper: half of the games, and draws
    assert experiment.reward(rock, {"s": 0.75, "p": 0.25}) == pytest.approx(0.5)
    assert experiment.reward(rock, {"?": 1.0}) == 1 and experiment.reward({"?": 1.0}, {"?": 1.0}) == 0
    monkeypatch.setattr(experiment, "EVERY", 1)
    outcome = experiment.Outcome("past", 0, (rock, rock, {"p": 1.0}, {"p": 1.0}))
    assert outcome.exploitability == 1
    # The third against the two before it, the fourth against the three before it.
    assert outcome.against_past == pytest.approx((1 + 1 + 0 + 1 + 1) / 5)


def test_the_games_of_roles() -> None:
    import roles as experiment

    assert experiment.prisoners("p", {"first": "k", "second": "t"}) == {"first": 0, "second": 5}
    assert experiment.prisoners("p", {"first": "k", "second": "k"}) == {"first": 3, "second": 3}
    assert experiment.prisoners("p", {"first": "a", "second": "k"}) == {"first": 5, "second": 0}
    right = {role: experiment.wanted("a", role) for role in experiment.ROLES}
    assert experiment.letters("a", right) == dict.fromkeys(experiment.ROLES, 1.0)
    assert experiment.letters("a", right | {"judge": "?"})["judge"] == 0
    assert len(experiment.SYMBOLS) == len(set(experiment.SYMBOLS))
