"""Diagnostics of a run: findings such as reward hacking or entropy collapse, each with evidence and settings to change.

A check compares the *end* of a run (the last fifth of its steps, at least 5, at most 50) with its *start* (as many
steps at its beginning), so a lone spike raises no finding, and a run is judged from its tenth step on. The thresholds
are the constants below; docs/dash.md explains each. Pure functions of series, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.types import CUT_BY, cut_metric

Floats = NDArray[np.float64]
Points = tuple[NDArray[np.int64], Floats]  # steps, values; all finite

MIN_STEPS = 10  # fewer steps are not judged
SIGNIFICANT = 2.0  # standard errors
ACCURACY_DROP = 0.05  # least drop of held-out accuracy
COLLAPSED, COLLAPSED_SHARE = 0.05, 0.2  # nats per token; share of the entropy at the start
SOLVED = 0.9  # from this accuracy on, low entropy is fine
ZERO_VARIANCE = 0.9  # share of groups whose rewards are all equal
KL_HIGH, KL_NOTABLE, KL_GROWTH = 1.0, 0.3, 5.0  # nats per token; nats with growth since the middle; that growth
CUT, CUT_GROWN, CUT_GROWTH = 0.3, 0.15, 3.0  # share of truncated episodes; share and growth that also count
CUT_MOST = 0.5  # from this share on, truncation explains equal rewards
FAILED = 0.1  # share of episodes that failed in the infrastructure
STEEPER = 10.0  # growth of the gradient norm
STALE = 0.5  # effective sample size, as a share
MISMATCH = 0.1  # nats per token between engine and learner
PULLED, PULL_LEAST = 5, 0.01  # steps in a row in which GVPO's pull outweighs the rewards; less is rounding
LONGER, LENGTH_CORRELATION, MIN_EPISODES = 1.5, 0.6, 50  # growth of answers; correlation with the reward; episodes


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    title: str
    sentence: str
    metrics: tuple[str, ...]  # the evidence
    first: int  # the steps that show it
    last: int
    settings: tuple[str, ...]  # that can be changed
    advice: str


@dataclass(frozen=True)
class Evidence:
    """The metrics of a run as series. `tasks`: validation tasks per evaluation, if known."""

    steps: Mapping[str, Points]
    evaluations: Mapping[str, Points]
    tasks: int | None = None
    lengths: Floats | None = None  # of recorded episodes
    rewards: Floats | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, by dotted name

    def series(self, name: str) -> Points | None:
        """A step metric with enough values."""
        points = self.steps.get(name)
        return points if points is not None and len(points[1]) >= MIN_STEPS else None


def too_early(steps: int) -> str | None:
    """Why a run is not judged yet; None if it is long enough."""
    if steps >= MIN_STEPS:
        return None
    return f"Too early to tell: a run is judged from its {MIN_STEPS}th step on, and this one has {steps}."


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, the most serious first."""
    return [finding for check in CHECKS if (finding := check(evidence)) is not None]


def as_data(findings: list[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def window(count: int) -> int:
    """The number of steps at the start and at the end that are compared."""
    return int(min(50, max(5, count // 5)))


def _ends(points: Points) -> tuple[float, float]:
    """Means at the start and at the end."""
    values, width = points[1], window(len(points[1]))
    return float(values[:width].mean()), float(values[-width:].mean())


def _end_steps(points: Points) -> tuple[int, int]:
    steps, width = points[0], window(len(points[0]))
    return int(steps[-width]), int(steps[-1])


def _rise(before: Floats, after: Floats) -> float:
    """How much higher `after` is, in standard errors; 0 if the means are equal."""
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    change = float(after.mean() - before.mean())
    return change / max(float(error), 1e-9) if change else 0.0


def _mean_since(evidence: Evidence, name: str, points: Points) -> float:
    """The mean, over the end of `points`, of a metric that is only written where it is not 0."""
    steps, values = evidence.steps.get(name, (np.array([], np.int64), np.array([])))
    return float(values[steps >= _end_steps(points)[0]].sum()) / window(len(points[1]))


def _truncated_share(evidence: Evidence) -> Points | None:
    """Runs of earlier versions only record the share among scored episodes."""
    return evidence.series("episodes/cut") or evidence.series("response/truncated")


def reward_hacking(evidence: Evidence) -> Finding | None:
    """The reward keeps rising after held-out accuracy has peaked and dropped."""
    reward, accuracy = evidence.series("reward/mean"), evidence.evaluations.get("eval/accuracy")
    if reward is None or accuracy is None or len(accuracy[1]) < 3:
        return None
    steps, values = accuracy
    best = int(values.argmax())
    later = values[max(best + 1, len(values) - 2) :]  # the last two evaluations: one alone may be chance
    if not len(later):
        return None
    top, now = float(values[best]), float(later.mean())
    noise = np.sqrt(2 * max(top * (1 - top), 0.01) / evidence.tasks) if evidence.tasks and 0 <= top <= 1 else 0.0
    if top - now < max(ACCURACY_DROP, noise):
        return None
    width = window(len(reward[1]))
    before = reward[1][reward[0] < max(int(steps[best]), int(reward[0][0]) + 1)][-width:]
    end = reward[1][-width:]
    if _rise(before, end) < SIGNIFICANT:
        return None
    return Finding(
        "reward_hacking",
        "Reward up, held-out accuracy down",
        f"Since step {steps[best]} the reward has risen from {before.mean():.3f} to {end.mean():.3f}, while held-out "
        f"accuracy fell from {top:.3f} to {now:.3f}: the reward may be exploited.",
        ("reward/mean", "eval/accuracy"),
        int(steps[best]),
        int(reward[0][-1]),
        ("reward.name", "reward.weights", "algorithm.kl_coef"),
        "Read the episodes with the highest reward; make the reward stricter, or raise the KL to the reference.",
    )


def entropy_collapse(evidence: Evidence) -> Finding | None:
    entropy = evidence.series("policy/entropy")
    if entropy is None:
        return None
    start, end = _ends(entropy)
    accuracy = evidence.evaluations.get("eval/accuracy")
    solved = accuracy is not None and len(accuracy[1]) and accuracy[1][-1] >= SOLVED
    if solved or end >= COLLAPSED or end >= COLLAPSED_SHARE * start:
        return None
    below = int(entropy[0][np.argmax(entropy[1] < COLLAPSED)])
    return Finding(
        "entropy_collapse",
        "Entropy has collapsed",
        f"Entropy per token fell from {start:.3f} to {end:.4f} nats, below {COLLAPSED} since step {below}: all "
        "attempts at a task are alike, and exploration has ended.",
        ("policy/entropy",),
        below,
        int(entropy[0][-1]),
        ("learner.lr", "learner.entropy_coef", "rollout.temperature"),
        "Lower the learning rate, add an entropy bonus, or sample at a higher temperature.",
    )


def zero_variance(evidence: Evidence) -> Finding | None:
    flat = evidence.series("groups/flat")
    if flat is None or (share := _ends(flat)[1]) < ZERO_VARIANCE:
        return None
    if (cut := _truncated_share(evidence)) is not None and _ends(cut)[1] >= CUT_MOST:
        return None  # rewards are equal because episodes are truncated: see `truncation`
    reward = evidence.series("reward/mean")
    mean = "" if reward is None else f" (mean reward {_ends(reward)[1]:.3f})"
    return Finding(
        "zero_variance",
        "Zero-variance groups",
        f"In {share:.0%} of the groups all rewards are equal{mean}: they give no learning signal.",
        ("groups/flat", "reward/std"),
        *_end_steps(flat),
        ("data.name", "rollout.group_size", "algorithm.filter_groups"),
        "Use easier tasks (or harder ones, if all are solved), larger groups, or a finer reward.",
    )


def kl_growth(evidence: Evidence) -> Finding | None:
    for name in ("kl/reference", "kl/samples"):
        kl = evidence.series(name)
        if kl is None:
            continue
        end, middle = _ends(kl)[1], float(np.median(kl[1][len(kl[1]) * 2 // 5 : len(kl[1]) * 3 // 5]))
        if end >= KL_HIGH or (end >= KL_NOTABLE and end >= KL_GROWTH * max(middle, 1e-9)):
            return Finding(
                "kl_growth",
                "KL is growing too fast",
                f"The KL to the reference is {end:.2f} nats per token, {end / max(middle, 1e-9):.1f} times that of the "
                "middle of the run: the model may forget what it knew.",
                (name,),
                *_end_steps(kl),
                ("algorithm.kl_coef", "algorithm.kl_target", "learner.lr"),
                "Raise the KL coefficient (or set a KL target), or lower the learning rate.",
            )
    return None


def anchor_pull(evidence: Evidence) -> Finding | None:
    """GVPO: the spread of βρ within groups exceeds that of the rewards at the end of the run."""
    pull, spread = evidence.series("gvpo/pull"), evidence.series("gvpo/reward_spread")
    accuracy = evidence.evaluations.get("eval/accuracy")
    if pull is None or spread is None or (accuracy is not None and len(accuracy[1]) and accuracy[1][-1] >= SOLVED):
        return None
    steps, at_pull, at_spread = np.intersect1d(pull[0], spread[0], return_indices=True)
    weaker = np.flatnonzero(pull[1][at_pull] <= np.maximum(spread[1][at_spread], PULL_LEAST))
    first = int(weaker[-1]) + 1 if len(weaker) else 0
    if len(steps) - first < PULLED:
        return None
    pulled, rewarded = float(pull[1][at_pull][first:].mean()), float(spread[1][at_spread][first:].mean())
    return Finding(
        "anchor_pull",
        "The anchor holds the policy back",
        f"For {len(steps) - first} steps the pull to the anchor has outweighed the rewards: β · std(ρ) is "
        f"{pulled:.2g} within groups, the standard deviation of the rewards {rewarded:.2g}.{_nats(evidence)}",
        ("gvpo/pull", "gvpo/reward_spread"),
        int(steps[first]),
        int(steps[-1]),
        ("algorithm.beta", "algorithm.reference"),
        "Lower algorithm.beta, or use an anchor that follows the policy: algorithm.reference=old, or moving.",
    )


def _nats(evidence: Evidence) -> str:
    """The nats per answer that the policy has used, and those that the gain in reward pays for."""
    ratio, reward = evidence.series("gvpo/mean_log_ratio"), evidence.series("reward/mean")
    beta, anchor = (evidence.settings.get(f"algorithm.{name}") for name in ("beta", "reference"))
    if ratio is None:
        return ""
    used = f" An answer is {_ends(ratio)[1]:.1f} nats from the anchor"
    if anchor != "initial" or reward is None or not isinstance(beta, int | float) or beta <= 0:
        return f"{used}."
    gain = _ends(reward)[1] - _ends(reward)[0]
    return f"{used}; the gain in reward, {gain:.3f}, pays for {max(gain, 0.0) / beta:.1f} (gain / β, β = {beta:g})."


def truncation(evidence: Evidence) -> Finding | None:
    cut = _truncated_share(evidence)
    if cut is None:
        return None
    start, end = _ends(cut)
    if end < CUT and not (end >= CUT_GROWN and end >= CUT_GROWTH * start):
        return None
    shares = {limit: _mean_since(evidence, cut_metric(limit), cut) for limit in CUT_BY}
    limits = sorted((limit for limit in CUT_BY if shares[limit] > 0), key=lambda limit: -shares[limit])
    causes = ", ".join(f"{shares[limit]:.0%} by {limit}" for limit in limits) or "by the length limit"
    return Finding(
        "truncation",
        "Episodes are truncated",
        f"{end:.0%} of the episodes end at a limit ({start:.0%} at the start), {causes}: they are scored unfinished, "
        "or skipped if no reward scores them.",
        tuple(map(cut_metric, limits)) or ("response/truncated", "response/length_mean"),
        *_end_steps(cut),
        (*(limits or ["rollout.max_tokens"]), "algorithm.overlong_buffer", "algorithm.truncated"),
        f"Raise {limits[0] if limits else 'the limit'}, penalise length, or mask truncated episodes in the loss.",
    )


def failures(evidence: Evidence) -> Finding | None:
    failed, total = evidence.series("episodes/failed"), evidence.series("episodes/total")
    if failed is None or total is None:
        return None
    unscored = "episodes/failed/truncated"  # truncated and not scored: see `truncation`
    lost, kept = _ends(failed)[1] - _mean_since(evidence, unscored, failed), _ends(total)[1]
    if lost < FAILED * (lost + kept):
        return None
    causes = {
        name: points[1].sum()
        for name, points in evidence.steps.items()
        if name.startswith("episodes/failed/") and name != unscored
    }
    worst = max(causes, key=lambda name: causes[name]) if causes else "episodes/failed"
    return Finding(
        "failures",
        "Episodes are failing",
        f"{lost / (lost + kept):.0%} of the episodes fail in the infrastructure, most by {worst.rsplit('/', 1)[-1]}: "
        "they are skipped, and the remaining ones may be biased.",
        ("episodes/failed", worst),
        *_end_steps(failed),
        ("agent.max_seconds", "agent.tool_seconds", "reward.seconds"),
        "The console shows the first failure of each cause; raise the time limits, or fix the tool or the reward.",
    )


def divergence(evidence: Evidence) -> Finding | None:
    norm, skipped = evidence.series("grad/norm"), evidence.series("optim/skipped")
    if skipped is not None and (count := skipped[1][-1] - skipped[1][-window(len(skipped[1]))]) > 0:
        what, span, metrics = f"{count:.0f} non-finite updates were skipped", _end_steps(skipped), ("optim/skipped",)
    elif norm is not None:
        start = float(np.median(norm[1][: max(MIN_STEPS // 2, len(norm[1]) // 4)]))
        end = float(np.median(norm[1][-window(len(norm[1])) :]))
        if end < STEEPER * max(start, 1e-9):
            return None
        what, span, metrics = f"The gradient norm grew from {start:.2g} to {end:.2g}", _end_steps(norm), ("grad/norm",)
    else:
        return None
    return Finding(
        "divergence",
        "Training diverges",
        f"{what}: the updates are too large.",
        metrics,
        *span,
        ("learner.lr", "learner.grad_clip", "learner.warmup_steps"),
        "Lower the learning rate, or warm it up for longer.",
    )


def off_policy(evidence: Evidence) -> Finding | None:
    ess, mismatch = evidence.series("policy/ess"), evidence.series("rollout/mismatch")
    if ess is not None and (share := _ends(ess)[1]) < STALE:
        what = f"The effective sample size is only {share:.0%}"
        points, metrics = ess, ["policy/ess", "policy/age"]
    elif mismatch is not None and (distance := _ends(mismatch)[1]) > MISMATCH:
        what = f"Engine and learner differ by {distance:.2f} nats per token under the same weights"
        points, metrics = mismatch, ["rollout/mismatch"]
    else:
        return None
    return Finding(
        "off_policy",
        "Samples are off-policy",
        f"{what}: a few tokens dominate each update.",
        tuple(name for name in metrics if name in evidence.steps),
        *_end_steps(points),
        ("mode.max_staleness", "learner.epochs", "algorithm.correction"),
        "Reduce the staleness of samples, make fewer updates per batch, or use importance correction.",
    )


def length_correlation(evidence: Evidence) -> Finding | None:
    length = evidence.series("response/length_mean")
    if length is None or evidence.lengths is None or evidence.rewards is None:
        return None
    known = np.isfinite(evidence.rewards) & np.isfinite(evidence.lengths)
    x, y = evidence.lengths[known], evidence.rewards[known]
    start, end = _ends(length)
    if len(x) < MIN_EPISODES or x.std() == 0 or y.std() == 0 or end < LONGER * start:
        return None
    correlation = float(np.corrcoef(x, y)[0, 1])
    if correlation < LENGTH_CORRELATION:
        return None
    return Finding(
        "length_correlation",
        "Longer answers are rewarded more",
        f"Answers grew from {start:.0f} to {end:.0f} tokens, and in the recorded episodes reward and length correlate "
        f"by {correlation:.2f}: the model may be learning length.",
        ("response/length_mean", "reward/mean"),
        *_end_steps(length),
        ("reward.weights", "algorithm.overlong_penalty", "algorithm.name"),
        "Read the longest episodes; remove length from the reward, or use an algorithm without length bias.",
    )


def reward_tradeoff(evidence: Evidence) -> Finding | None:
    """One named reward rises while another falls."""
    changes: dict[str, tuple[float, float, float]] = {}
    for name in evidence.steps:
        parts = name.split("/")
        points = evidence.series(name)
        if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean" and points is not None:
            width = window(len(points[1]))
            start, end = points[1][:width], points[1][-width:]
            changes[name] = (_rise(start, end), float(start.mean()), float(end.mean()))
    up = max(changes, key=lambda name: changes[name][0], default=None)
    down = min(changes, key=lambda name: changes[name][0], default=None)
    if up is None or down is None or changes[up][0] < SIGNIFICANT or changes[down][0] > -2 * SIGNIFICANT:
        return None
    _, before, after = changes[down]
    if before - after < 0.2 * abs(before):
        return None
    return Finding(
        "reward_tradeoff",
        "One reward rises at another's cost",
        f"{up.split('/')[1]} rises, while {down.split('/')[1]} fell from {before:.3f} to {after:.3f}.",
        (up, down),
        *_end_steps(evidence.steps[down]),
        ("reward.weights", "reward.only_if", "algorithm.name"),
        "Raise the weight of the falling reward, make one a condition of the other, or use a multi-reward algorithm.",
    )


CHECKS: tuple[Callable[[Evidence], Finding | None], ...] = (
    reward_hacking,
    divergence,
    kl_growth,
    anchor_pull,
    entropy_collapse,
    zero_variance,
    failures,
    truncation,
    off_policy,
    length_correlation,
    reward_tradeoff,
)
