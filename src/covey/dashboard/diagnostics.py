"""What a failing run looks like, in words: from the numbers of a run to findings, each with its evidence and a setting.

A sign compares the *end* of a run (the last fifth of its steps, at least 5, at most 50) with its *start* (as many steps
at its beginning), so that a lone spike raises no alarm and a run is judged from its tenth step on. The thresholds are
the constants below, explained one by one in docs/dash.md. Pure functions of series: no file is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.types import CUT_BY, cut_metric

Floats = NDArray[np.float64]
Points = tuple[NDArray[np.int64], Floats]  # steps, values; all finite

FEWEST = 10  # steps below which nothing is said
SURE = 2.0  # standard errors that make a change more than noise
ACCURACY_FALL = 0.05  # a fall in held-out accuracy that matters, beside chance
COLLAPSED, COLLAPSED_SHARE = 0.05, 0.2  # nats per token; share of the entropy at the start
SOLVED = 0.9  # accuracy from which little doubt is no fault
FLAT = 0.9  # share of groups without a signal
KL_HIGH, KL_NOTABLE, KL_GROWTH = 1.0, 0.3, 5.0  # nats per token; the same with growth since the middle
CUT, CUT_GROWN, CUT_GROWTH = 0.3, 0.15, 3.0  # share of episodes cut off; share and growth that also count
CUT_MOST = 0.5  # share from which it explains that attempts score alike
FAILED = 0.1  # share of episodes that the infrastructure broke
STEEPER = 10.0  # growth of the gradient's norm
STALE = 0.5  # effective sample size, as a share
DISAGREE = 0.1  # nats per token between sampler and learner
LONGER, PAID_BY_LENGTH, EPISODES = 1.5, 0.6, 50  # growth of answers; correlation with the reward; episodes it needs


@dataclass(frozen=True, slots=True)
class Sign:
    name: str
    title: str
    sentence: str
    metrics: tuple[str, ...]  # the evidence
    first: int  # steps between which it shows
    last: int
    settings: tuple[str, ...]  # what to turn
    advice: str


@dataclass(frozen=True)
class Evidence:
    """The series of a run. `tasks`: how many an evaluation asks, where known."""

    steps: Mapping[str, Points]
    evaluations: Mapping[str, Points]
    tasks: int | None = None
    lengths: Floats | None = None  # of recorded episodes, and what each was paid
    rewards: Floats | None = None

    def at(self, name: str) -> Points | None:
        """A series long enough to speak of."""
        points = self.steps.get(name)
        return points if points is not None and len(points[1]) >= FEWEST else None


def too_early(steps: int) -> str | None:
    """Why nothing is said of a run yet; None: it is long enough to be judged."""
    if steps >= FEWEST:
        return None
    return f"Too early to tell: a run is judged from its {FEWEST}th step on, and this one has {steps}."


def find_signs(evidence: Evidence) -> list[Sign]:
    """What is wrong, the worst first."""
    found = [check(evidence) for check in CHECKS]
    return [sign for sign in found if sign is not None]


def as_data(signs: list[Sign]) -> list[dict[str, Any]]:
    return [asdict(sign) for sign in signs]


def window(count: int) -> int:
    return int(min(50, max(5, count // 5)))


def _ends(points: Points) -> tuple[float, float]:
    """Means at the start and at the end."""
    values, width = points[1], window(len(points[1]))
    return float(values[:width].mean()), float(values[-width:].mean())


def _span(points: Points) -> tuple[int, int]:
    steps, width = points[0], window(len(points[0]))
    return int(steps[-width]), int(steps[-1])


def _rise(before: Floats, after: Floats) -> float:
    """How much higher `after` is, in standard errors; 0 where neither varies and both are alike."""
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    change = float(after.mean() - before.mean())
    return change / max(float(error), 1e-9) if change else 0.0


def hacking(evidence: Evidence) -> Sign | None:
    """The reward goes on rising after held-out accuracy has peaked and fallen."""
    reward, accuracy = evidence.at("reward/mean"), evidence.evaluations.get("eval/accuracy")
    if reward is None or accuracy is None or len(accuracy[1]) < 3:
        return None
    steps, values = accuracy
    best = int(values.argmax())
    later = values[
        max(best + 1, len(values) - 2) :
    ]  # one evaluation alone may be chance: the last two, where there are
    if not len(later):
        return None
    top, now = float(values[best]), float(later.mean())
    noise = np.sqrt(2 * max(top * (1 - top), 0.01) / evidence.tasks) if evidence.tasks and 0 <= top <= 1 else 0.0
    if top - now < max(ACCURACY_FALL, noise):
        return None
    width = window(len(reward[1]))
    until = reward[1][reward[0] < max(int(steps[best]), int(reward[0][0]) + 1)][-width:]
    end = reward[1][-width:]
    if _rise(until, end) < SURE:
        return None
    return Sign(
        "hacking",
        "Reward up, held-out accuracy down",
        f"Since step {steps[best]} the reward has risen from {until.mean():.3f} to {end.mean():.3f}, while accuracy on "
        f"held-out tasks fell from {top:.3f} to {now:.3f}: the model is paid for something other than the work.",
        ("reward/mean", "eval/accuracy"),
        int(steps[best]),
        int(reward[0][-1]),
        ("reward.name", "reward.weights", "algorithm.kl_coef"),
        "Read the best-paid episodes; make the reward stricter, or hold the model nearer to its reference.",
    )


def entropy_collapse(evidence: Evidence) -> Sign | None:
    entropy = evidence.at("policy/entropy")
    if entropy is None:
        return None
    start, end = _ends(entropy)
    accuracy = evidence.evaluations.get("eval/accuracy")
    solved = accuracy is not None and len(accuracy[1]) and accuracy[1][-1] >= SOLVED
    if solved or end >= COLLAPSED or end >= COLLAPSED_SHARE * start:
        return None
    below = int(entropy[0][np.argmax(entropy[1] < COLLAPSED)])
    return Sign(
        "entropy_collapse",
        "Entropy has collapsed",
        f"Doubt per token fell from {start:.3f} to {end:.4f} nats, below {COLLAPSED} since step {below}: all attempts "
        "at a task come out alike, and nothing new is tried.",
        ("policy/entropy",),
        below,
        int(entropy[0][-1]),
        ("learner.lr", "learner.entropy_coef", "rollout.temperature"),
        "Lower the learning rate, reward entropy, or sample at a higher temperature.",
    )


def no_signal(evidence: Evidence) -> Sign | None:
    flat = evidence.at("groups/flat")
    if flat is None or (share := _ends(flat)[1]) < FLAT:
        return None
    if (cut := _cut(evidence)) is not None and _ends(cut)[1] >= CUT_MOST:
        return None  # attempts score alike because they are unfinished: see `truncation`
    reward = evidence.at("reward/mean")
    paid = "" if reward is None else f" (mean reward {_ends(reward)[1]:.3f})"
    return Sign(
        "no_signal",
        "Groups without a signal",
        f"In {share:.0%} of the groups all attempts score alike{paid}: nothing can be learned from them.",
        ("groups/flat", "reward/std"),
        *_span(flat),
        ("data.name", "rollout.group_size", "algorithm.filter_groups"),
        "Take easier tasks (or harder ones, if all are solved), larger groups, or a finer reward.",
    )


def kl_runaway(evidence: Evidence) -> Sign | None:
    for name in ("kl/reference", "kl/samples"):
        kl = evidence.at(name)
        if kl is None:
            continue
        end, middle = _ends(kl)[1], float(np.median(kl[1][len(kl[1]) * 2 // 5 : len(kl[1]) * 3 // 5]))
        if end >= KL_HIGH or (end >= KL_NOTABLE and end >= KL_GROWTH * max(middle, 1e-9)):
            return Sign(
                "kl_runaway",
                "KL is running away",
                f"The distance from the reference is {end:.2f} nats per token, {end / max(middle, 1e-9):.1f} times "
                "that of the middle of the run: the model is losing what it knew.",
                (name,),
                *_span(kl),
                ("algorithm.kl_coef", "algorithm.kl_target", "learner.lr"),
                "Raise the KL coefficient (or steer it with a target), or lower the learning rate.",
            )
    return None


def _cut(evidence: Evidence) -> Points | None:
    """The share of episodes that a limit ended. Runs of earlier versions record only those that are scored."""
    return evidence.at("episodes/cut") or evidence.at("response/truncated")


def truncation(evidence: Evidence) -> Sign | None:
    cut = _cut(evidence)
    if cut is None:
        return None
    start, end = _ends(cut)
    if end < CUT and not (end >= CUT_GROWN and end >= CUT_GROWTH * start):
        return None
    shares = {limit: _mean_since(evidence, cut_metric(limit), cut) for limit in CUT_BY}
    limits = sorted((limit for limit in CUT_BY if shares[limit] > 0), key=lambda limit: -shares[limit])
    named = ", ".join(f"{shares[limit]:.0%} by {limit}" for limit in limits) or "by the length limit"
    return Sign(
        "truncation",
        "Episodes are cut off",
        f"{end:.0%} of the episodes end at a limit ({start:.0%} at the start), {named}: they are scored unfinished, or "
        "left out where nothing scores them.",
        tuple(map(cut_metric, limits)) or ("response/truncated", "response/length_mean"),
        *_span(cut),
        (*(limits or ["rollout.max_tokens"]), "algorithm.overlong_buffer", "algorithm.truncated"),
        f"Raise {limits[0] if limits else 'the limit'}, punish length, or leave cut episodes out of the loss.",
    )


def _mean_since(evidence: Evidence, name: str, points: Points) -> float:
    """The mean over the end of `points` of a metric that is written only in steps where it is not 0."""
    steps, values = evidence.steps.get(name, (np.array([], np.int64), np.array([])))
    return float(values[steps >= _span(points)[0]].sum()) / window(len(points[1]))


def failures(evidence: Evidence) -> Sign | None:
    failed, total = evidence.at("episodes/failed"), evidence.at("episodes/total")
    if failed is None or total is None:
        return None
    unfinished = "episodes/failed/truncated"  # cut off and not scored: see `truncation`
    lost, kept = _ends(failed)[1] - _mean_since(evidence, unfinished, failed), _ends(total)[1]
    if lost < FAILED * (lost + kept):
        return None
    causes = {
        name: points[1].sum()
        for name, points in evidence.steps.items()
        if name.startswith("episodes/failed/") and name != unfinished
    }
    worst = max(causes, key=lambda name: causes[name]) if causes else "episodes/failed"
    return Sign(
        "failures",
        "Episodes are failing",
        f"{lost / (lost + kept):.0%} of the episodes are broken by the infrastructure, most by "
        f"{worst.rsplit('/', 1)[-1]}: they are left out, and what is left may not be typical.",
        ("episodes/failed", worst),
        *_span(failed),
        ("agent.max_seconds", "agent.tool_seconds", "reward.seconds"),
        "The console tells the first failure of each cause; raise the time limits, or mend the tool or the reward.",
    )


def divergence(evidence: Evidence) -> Sign | None:
    norm, skipped = evidence.at("grad/norm"), evidence.at("optim/skipped")
    if skipped is not None and (left_out := skipped[1][-1] - skipped[1][-window(len(skipped[1]))]) > 0:
        what, span, metrics = f"{left_out:.0f} updates were left out as not finite", _span(skipped), ("optim/skipped",)
    elif norm is not None and _median_end(norm) >= STEEPER * max(_median_start(norm), 1e-9):
        what = f"The gradient's norm grew from {_median_start(norm):.2g} to {_median_end(norm):.2g}"
        span, metrics = _span(norm), ("grad/norm",)
    else:
        return None
    return Sign(
        "divergence",
        "Training diverges",
        f"{what}: the updates are larger than the model can bear.",
        metrics,
        *span,
        ("learner.lr", "learner.grad_clip", "learner.warmup_steps"),
        "Lower the learning rate, or warm it up for longer.",
    )


def off_policy(evidence: Evidence) -> Sign | None:
    ess, apart = evidence.at("policy/ess"), evidence.at("rollout/mismatch")
    if ess is not None and (share := _ends(ess)[1]) < STALE:
        what = f"The samples are worth only {share:.0%} of their number to the policy that learns from them"
        points, metrics = ess, ["policy/ess", "policy/age"]
    elif apart is not None and (distance := _ends(apart)[1]) > DISAGREE:
        what = f"Sampler and learner disagree by {distance:.2f} nats per token about the same weights"
        points, metrics = apart, ["rollout/mismatch"]
    else:
        return None
    return Sign(
        "off_policy",
        "Samples do not fit the policy",
        f"{what}: a few tokens steer each update.",
        tuple(name for name in metrics if name in evidence.steps),
        *_span(points),
        ("mode.max_staleness", "learner.epochs", "algorithm.correction"),
        "Let samples grow less old, make fewer updates of each batch, or correct for the difference.",
    )


def paid_by_length(evidence: Evidence) -> Sign | None:
    length = evidence.at("response/length_mean")
    if length is None or evidence.lengths is None or evidence.rewards is None:
        return None
    known = np.isfinite(evidence.rewards) & np.isfinite(evidence.lengths)
    x, y = evidence.lengths[known], evidence.rewards[known]
    start, end = _ends(length)
    if len(x) < EPISODES or x.std() == 0 or y.std() == 0 or end < LONGER * start:
        return None
    together = float(np.corrcoef(x, y)[0, 1])
    if together < PAID_BY_LENGTH:
        return None
    return Sign(
        "paid_by_length",
        "Longer answers are paid more",
        f"Answers grew from {start:.0f} to {end:.0f} tokens, and in the recorded episodes reward and length go "
        f"together (correlation {together:.2f}): length may be what is learned.",
        ("response/length_mean", "reward/mean"),
        *_span(length),
        ("reward.weights", "algorithm.overlong_penalty", "algorithm.name"),
        "Read the longest episodes; take length out of the reward, or an algorithm without a bias to length.",
    )


def traded(evidence: Evidence) -> Sign | None:
    """One named reward rises, and another falls with it."""
    changes: dict[str, tuple[float, float, float]] = {}
    for name in evidence.steps:
        parts = name.split("/")
        points = evidence.at(name)
        if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean" and points is not None:
            width = window(len(points[1]))
            start, end = points[1][:width], points[1][-width:]
            changes[name] = (_rise(start, end), float(start.mean()), float(end.mean()))
    up = max(changes, key=lambda name: changes[name][0], default=None)
    down = min(changes, key=lambda name: changes[name][0], default=None)
    if up is None or down is None or changes[up][0] < SURE or changes[down][0] > -2 * SURE:
        return None
    _, before, after = changes[down]
    if before - after < 0.2 * abs(before):
        return None
    span = _span(evidence.steps[down])
    return Sign(
        "traded",
        "One reward is paid for with another",
        f"{up.split('/')[1]} rises, while {down.split('/')[1]} fell from {before:.3f} to {after:.3f}.",
        (up, down),
        *span,
        ("reward.weights", "reward.only_if", "algorithm.name"),
        "Weigh the falling reward more, make one a condition of the other, or use an algorithm for several rewards.",
    )


def _median_start(points: Points) -> float:
    return float(np.median(points[1][: max(FEWEST // 2, len(points[1]) // 4)]))


def _median_end(points: Points) -> float:
    return float(np.median(points[1][-window(len(points[1])) :]))


CHECKS: tuple[Callable[[Evidence], Sign | None], ...] = (
    hacking,
    divergence,
    kl_runaway,
    entropy_collapse,
    no_signal,
    failures,
    truncation,
    off_policy,
    paid_by_length,
    traded,
)
