"""The section of a study in docs/results.md: tables, and a sentence for every comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from tiny import table

from covey.evaluation.scores import format_p
from covey.evaluation.statistics import Estimate
from studies import reading
from studies.paired import Difference, Values, accuracy, compare
from studies.plan import WITHOUT_FILES, Study
from studies.reading import Evaluated
from studies.record import FINISHED, Record

ABSENT = "–"


@dataclass(frozen=True)
class Results:
    """The finished records of a study on one device, by experiment and in the order of the seeds."""

    study: Study
    records: dict[str, list[Record]]

    @classmethod
    def of(cls, study: Study, records: Sequence[Record]) -> Results:
        done = [record for record in records if record["status"] == FINISHED]
        found: dict[str, list[Record]] = {}
        for experiment in study.experiments:
            own = [record for record in done if record["experiment"] == experiment.name]
            if own:
                found[experiment.name] = sorted(own, key=lambda record: record["seed"])
        return cls(study, found)

    @property
    def everything(self) -> list[Record]:
        return [record for group in self.records.values() for record in group]

    @property
    def shared_seconds(self) -> float:
        """The training time that every run has reached."""
        return min(reading.cumulative_seconds(record)[-1] for record in self.everything)

    def final(self, name: str, metric: str) -> list[Evaluated]:
        return [reading.evaluations(record, metric)[-1] for record in self.records[name]]

    def pairs(self) -> list[tuple[str, str]]:
        names = list(self.records)
        if self.study.compare_all:
            return list(combinations(names, 2))
        first = self.study.first
        return [(first, name) for name in names if name != first] if first in names else []


def section(results: Results, picture: str) -> str:
    """Markdown of the whole section."""
    study = results.study
    if not results.records:
        return f"Not run yet. `{command(study)}` makes its {len(study.experiments) * len(study.seeds)} runs."
    parts = [f"![{study.title}]({picture})", accuracy_table(results), behaviour_table(results)]
    parts += [block for make in EXTRA.get(study.name, ()) if (block := make(results))]
    if comparisons := comparison_table(results):
        parts.append(comparisons)
    if several := [record for record in results.everything if record["transfer"].get("after")]:
        parts.append(transfer_table(results, several))
    return "\n\n".join([*parts, conditions(results)])


# -- Tables ------------------------------------------------------------------------------------------------------------


def accuracy_table(results: Results) -> str:
    study, seconds = results.study, results.shared_seconds
    metric = study.metric
    head = ["", "seeds", "before", "after equal updates"]
    head += [f"after equal time, {seconds:.0f} s", "each seed"] if study.timed else ["each seed"]
    rows = []
    for name, records in results.records.items():
        before = [reading.evaluations(record, metric)[0].values for record in records]
        after = [one.values for one in results.final(name, metric)]
        seeds = " · ".join(f"{100 * fmean(values):.1f}" for values in after)
        cells = [name, str(len(records)), _percent(accuracy(before)), f"**{_percent(accuracy(after))}**"]
        if study.timed:
            cells.append(_percent(accuracy([reading.at_time(record, metric, seconds).values for record in records])))
        rows.append([*cells, seeds])
    problems = len(results.everything[0]["evaluations"]["tasks"])
    intro = (
        f"Accuracy (`{metric}`, greedy) on {problems} held-out tasks, in per cent with 95 % intervals over seeds and "
        "tasks."
    )
    return f"{intro}\n\n{table(head, rows)}"


def behaviour_table(results: Results) -> str:
    timed = results.study.timed
    head = ["", "reward", "entropy", "KL to the start", "tokens of a test answer", "cut off"]
    head += [*(["s per step"] if timed else []), "sampled tokens", "updates"]
    rows = []
    for name, records in results.records.items():
        rows.append(
            [
                name,
                _ends(records, reading.reward_ends, 2),
                _ends(records, lambda record: reading.ends(record, "policy/entropy"), 3),
                _number(reading.mean_of(records, reading.final_kl), 4),
                _change(records, "tokens", 0),
                _change(records, "cut", 2),
                *([_number(reading.mean_of(records, reading.seconds_per_step), 1)] if timed else []),
                f"{fmean(map(reading.sampled_tokens, records)):,.0f}",
                str(len(records[0]["steps"]["timing/step"])),
            ]
        )
    note = (
        f"Means over seeds; reward, entropy and KL are means of the first → last {reading.LAST} steps. KL: nats per "
        "token from the start model, over sampled answers."
    )
    return f"{table(head, rows)}\n\n{note}"


def comparison_table(results: Results) -> str:
    """Every comparison at equal updates and, if times are compared, at equal time; and what can be said."""
    rows, sentences = [], []
    moments: dict[str, float | None] = {"updates": None}
    if results.study.timed:
        moments["time"] = results.shared_seconds
    for first, second in results.pairs():
        for what, seconds in moments.items():
            found = difference(results, first, second, seconds)
            if found is None:
                continue
            estimate = found.estimate
            bounds = f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"
            seeds = " · ".join(f"{100 * value:+.1f}" for value in found.by_seed)
            rows.append([f"{second} − {first}", what, bounds, seeds, format_p(found.p)])
            sentences.append(f"- At equal {what}: {found.sentence()}")
    if not rows:
        return ""
    head = ["difference in points", "equal", "95 % interval", "each seed", "p over tasks"]
    note = (
        f"{len(rows)} comparisons are made; without any difference one in twenty intervals would still exclude 0. An "
        "order is claimed only where the interval over seeds and tasks excludes 0."
    )
    return "\n\n".join([table(head, rows), "\n".join(sentences), note])


def difference(results: Results, first: str, second: str, seconds: float | None) -> Difference | None:
    """On the seeds that both have; None if they share none."""
    metric = results.study.metric
    ours = {record["seed"]: record for record in results.records[first]}
    theirs = {record["seed"]: record for record in results.records[second]}
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return None

    def values(records: dict[int, Record]) -> Values:
        if seconds is None:
            return [reading.evaluations(records[seed], metric)[-1].values for seed in seeds]
        return [reading.at_time(records[seed], metric, seconds).values for seed in seeds]

    return compare(first, second, values(ours), values(theirs))


def transfer_table(results: Results, records: Sequence[Record]) -> str:
    metric = results.study.metric
    names = [one.name for one in results.study.transfer]
    rows = []
    for name, group in results.records.items():
        own = [record for record in group if record in records]
        cells = [name]
        for one in names:
            before = [found for record in own if (found := reading.transfer(record, one, metric, "before"))]
            after = [found for record in own if (found := reading.transfer(record, one, metric, "after"))]
            if not after or len(before) != len(after):
                cells += [ABSENT, ABSENT]
                continue
            change = compare("before", "after", before, after)
            cells += [f"{_percent(accuracy(before))} → {_percent(accuracy(after))}", _points(change.estimate)]
        rows.append(cells)
    head = ["", *(cell for one in names for cell in (f"{one}: before → after", "change"))]
    return f"Tasks of other kinds, which no run trains on (greedy):\n\n{table(head, rows)}"


def conditions(results: Results) -> str:
    """Where, when and with what it was measured."""
    records = results.everything
    devices = sorted({record["device"] for record in records})
    versions = sorted({f"{name} {v}" for record in records for name, v in record["versions"].items()})
    commits = sorted({record["commit"] for record in records})
    dates = sorted({record["date"] for record in records})
    most = max((len(part["beside"]) for record in records for part in record["parts"]), default=0)
    lines = [
        f"- {', '.join(devices)}; {', '.join(versions)}; {records[0]['dtype']}",
        f"- {dates[0]}{' to ' + dates[-1] if len(dates) > 1 else ''}, commit {', '.join(commits)}",
        f"- up to {max(record['share'] for record in records)} at a time on the device; a run had up to {most} other "
        "processes beside it in its time, "
        + (
            "so seconds compare runs of this table only"
            if results.study.timed
            else "and other work, so no time is shown"
        ),
        f"- `{command(results.study)}`",
    ]
    return "\n".join(lines)


def command(study: Study) -> str:
    inputs = "" if study.data in WITHOUT_FILES else " --models MODELS --data DATA"
    return f"python benchmarks/study.py {study.name}{inputs}"


# -- Tables of single studies ------------------------------------------------------------------------------------------


def limit_table(results: Results) -> str:
    """Two aims: right answers, and answers within the limit."""
    limit = results.study.limit
    assert limit is not None
    head = [
        "",
        "right",
        f"within {limit} tokens",
        "the worse of the two",
        "each seed",
        "well formed",
        "DGDO's weights, last",
    ]
    rows = []
    for name, records in results.records.items():
        finals = results.final(name, results.study.metric)
        right = [one.mean for one in finals]
        within = [fmean(float(tokens <= limit) for tokens in one.tokens) for one in finals]
        worse = [min(pair) for pair in zip(right, within, strict=True)]
        shaped = [one.mean for one in (reading.evaluations(record, "format")[-1] for record in records)]
        cells = [name, *(f"{100 * fmean(values):.1f}" for values in (right, within))]
        cells += [f"**{100 * fmean(worse):.1f}**", " · ".join(f"{100 * value:.1f}" for value in worse)]
        rows.append([*cells, f"{100 * fmean(shaped):.1f}", _weights(records)])
    return f"At the end, in per cent:\n\n{table(head, rows)}"


def _weights(records: Sequence[Record]) -> str:
    names = [name for name in records[0]["steps"] if name.startswith("dgdo/") and name.endswith("/weight")]
    pairs = [(name.split("/")[1], [reading.ends(record, name) for record in records]) for name in names]
    return ", ".join(f"{reward} {fmean(one[1] for one in ends if one):.2f}" for reward, ends in pairs) or ABSENT


def tool_table(results: Results) -> str:
    """Calls and turns of an evaluation episode."""
    rows = [
        [name, _change(records, "tools", 2), _change(records, "turns", 2)] for name, records in results.records.items()
    ]
    return table(["per held-out task", "tool calls, before → after", "replies, before → after"], rows)


def match_table(results: Results) -> str:
    rows = []
    for name, records in results.records.items():
        cells = [name]
        for metric in ("qa_f1_reward/em", "qa_f1_reward/f1"):
            own = [record for record in records if metric in record["evaluations"]["at"][0]["rewards"]]
            values = [[reading.evaluations(record, metric)[at].values for record in own] for at in (0, -1)]
            cells.append(" → ".join(_percent(accuracy(one)) for one in values) if own else ABSENT)
        rows.append(cells)
    return table(["", "exact match, before → after", "F1, before → after"], rows)


def kinds_table(results: Results) -> str:
    """Kinds of instruction that were trained on, and others; ids begin with the group."""
    rows = []
    for name, records in results.records.items():
        for group in ("seen", "unseen"):
            chosen = [n for n, task in enumerate(records[0]["evaluations"]["tasks"]) if task.startswith(f"{group}/")]
            sides = []
            for at in (0, -1):
                found = [reading.evaluations(record, results.study.metric)[at].values for record in records]
                sides.append([[values[n] for n in chosen] for values in found])
            change = compare("before", "after", *sides)
            cells = [name, f"{group} kinds", str(len(chosen)), *map(_percent, map(accuracy, sides))]
            rows.append([*cells, _points(change.estimate)])
    return table(["", "prompts with", "prompts", "before", "after", "change"], rows)


def age_table(results: Results) -> str:
    rows = [
        [
            name,
            _ends(records, lambda record: reading.ends(record, "policy/age"), 2, last_only=True),
            _ends(records, lambda record: reading.ends(record, "policy/ess"), 3, last_only=True),
            f"{fmean(reading.cumulative_seconds(record)[-1] for record in records):.0f}",
        ]
        for name, records in results.records.items()
    ]
    return table(["", "age of a token, updates", "effective sample size", "training, s"], rows)


EXTRA: dict[str, tuple[Callable[[Results], str], ...]] = {
    "rewards": (limit_table,),
    "smollm2-rewards": (limit_table,),
    "agents-tools": (tool_table,),
    "agents-search": (match_table, tool_table),
    "agents-code": (tool_table,),
    "agents-ifeval": (kinds_table,),
    "staleness": (age_table,),
}


# -- Cells -------------------------------------------------------------------------------------------------------------


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _points(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def _ends(
    records: Sequence[Record],
    figure: Callable[[Record], tuple[float, float] | None],
    digits: int,
    last_only: bool = False,
) -> str:
    found = [ends for record in records if (ends := figure(record)) is not None]
    if not found:
        return ABSENT
    first, last = (fmean(one[at] for one in found) for at in (0, 1))
    return f"{last:.{digits}f}" if last_only else f"{first:.{digits}f} → {last:.{digits}f}"


def _change(records: Sequence[Record], column: str, digits: int) -> str:
    """Of the first and the last evaluation."""
    first, last = (
        reading.mean_of(records, lambda record, at=at: reading.column_mean(record, at, column)) for at in (0, -1)
    )
    return f"{_number(first, digits)} → {_number(last, digits)}"
