"""Every numeric setting states its range, and a value outside is refused wherever it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import pytest

from covey.algorithms import ALGORITHMS as CATALOGUE
from covey.algorithms import make, schema
from covey.config.aliases import ALIASES
from covey.config.settings import Setting, algorithm_settings, schema_settings
from covey.errors import InputError
from covey.ranges import Range, Tokens, allowed, check_ranges, type_text
from covey.types import Sampling

WRONG = {
    "not a number": "nan",
    "infinite": "inf",
    "minus infinite": "-inf",
    "beyond all floats": "1e400",
    "text": "banana",
    "a truth value": "true",
    "a list": "[[1],[2]]",
}
NUMBERS = {"negative": "-1", "zero": "0", "one": "1", "one and a half": "1.5", "huge": "1" + "0" * 40}


def numeric(settings: Iterable[Setting]) -> list[Setting]:
    return [setting for setting in settings if re.search(r"\b(int|float)\b", setting.type)]


def of_algorithms() -> list[tuple[str, str, Setting]]:
    """Every algorithm with every loss: its name, the loss, a numeric setting."""
    found = []
    for name in CATALOGUE:
        for loss, settings in schema(name).losses.items():
            found += [(name, loss, s) for s in numeric(algorithm_settings(name, {name: settings}).values())]
    return found


def word(setting: Setting, value: str) -> str:
    """One entry of it where the setting is a table or a list."""
    if setting.type.startswith("dict"):
        return f"{setting.key}.a={value}"
    return f"{setting.key}=[{value}]" if setting.type.startswith("list") else f"{setting.key}={value}"


def inside(setting: Setting, text: str) -> bool:
    """By the bounds and the type alone."""
    value, within = float(text), setting.allowed.within
    if not math.isfinite(value) or ("int" in setting.type and not value.is_integer()):
        return False
    if value == within.low:
        return not within.above
    if value == within.high:
        return not within.below
    return within.low < value < within.high


def refused(error: InputError) -> set[str]:
    """The settings that an error names."""
    return {line.partition(" must be ")[0] for line in str(error).splitlines() if " must be " in line}


# --- all settings ------------------------------------------------------------------------------------------------


def without_range(settings: Iterable[Setting]) -> list[str]:
    return [setting.key for setting in numeric(settings) if setting.allowed is None]


def test_every_number_has_a_range():
    """A new numeric setting needs one: annotate its field with one of covey.ranges, or with a Range of its own."""
    assert without_range(schema_settings().values()) == []
    assert without_range(setting for _, _, setting in of_algorithms()) == []
    assert len(numeric(schema_settings().values())) > 60


def test_a_number_without_a_range_is_found():
    @dataclass(frozen=True)
    class New:
        name: str = "new"
        sharpness: float = 1.0
        limits: dict[str, int] | None = None
        bounded: Annotated[float, Range(0, 1)] = 0.5

    found = algorithm_settings("new", {"new": New})
    assert without_range(found.values()) == ["algorithm.sharpness", "algorithm.limits"]


def test_every_default_is_in_its_range():
    for setting in (*schema_settings().values(), *(s for _, _, s in of_algorithms())):
        assert setting.allowed is None or setting.default in setting.allowed, setting


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_finite_number_is_refused_everywhere(run, kind):
    settings = numeric(schema_settings().values())
    with pytest.raises(InputError) as error:
        run(*(word(setting, WRONG[kind]) for setting in settings))
    assert refused(error.value) == {word(setting, "").partition("=")[0] for setting in settings}


@pytest.mark.parametrize("kind", NUMBERS)
def test_all_numbers_out_of_range_are_named_at_once(run, kind):
    value, settings = NUMBERS[kind], numeric(schema_settings().values())
    outside = {word(s, "").partition("=")[0] for s in settings if not inside(s, value)}
    with pytest.raises(InputError) as error:
        run(*(word(setting, value) for setting in settings), "rollout.temperature=nan")
    assert refused(error.value) == outside | {"rollout.temperature"}


def test_null_is_refused_where_the_type_has_none(run):
    settings = numeric(schema_settings().values())
    with pytest.raises(InputError) as error:
        run(*(f"{setting.key}=null" for setting in settings))
    assert refused(error.value) == {s.key for s in settings if "None" not in s.type}


@pytest.mark.parametrize("value", [*(v for v in NUMBERS.values()), "nan", "inf", "-inf"])
def test_numbers_of_every_algorithm_with_every_loss(value):
    for name, loss, setting in of_algorithms():
        field, number = setting.key.removeprefix("algorithm."), float(value)
        if "int" in setting.type and not number.is_integer():
            continue  # the type says that, before an algorithm is made
        given = {"a": number} if setting.type.startswith("dict") else number
        try:
            make(name, loss=loss, **{field: int(number) if "int" in setting.type else given})
            said = ""
        except ValueError as error:  # two settings may contradict each other where each is in its range
            said = str(error)
        assert said.startswith(f"{setting.key} must be ") == (not inside(setting, value)), (name, loss, field, said)


@pytest.mark.parametrize("name", ["gvpo", "dgdo", "ppo", "sapo"])
@pytest.mark.parametrize("value", ["nan", "-1", "1e400"])
def test_an_algorithms_numbers_in_the_configuration(run, name, value):
    settings = numeric(algorithm_settings(name, {name: schema(name)}).values())
    outside = {word(s, "").partition("=")[0] for s in settings if not inside(s, value)}
    with pytest.raises(InputError) as error:
        run(f"algorithm={name}", *(word(setting, value) for setting in settings))
    assert refused(error.value) == outside != set()


# --- other vocabularies ------------------------------------------------------------------------------------------


def rounds(targets: Mapping[str, str]) -> list[dict[str, str]]:
    """Spelling → native key, in groups that name no native key twice."""
    found: list[dict[str, str]] = []
    for spelling, key in targets.items():
        free = next((group for group in found if key not in group.values()), None)
        if free is None:
            found.append(free := {})
        free[spelling] = key
    return found


@pytest.mark.parametrize("name", ["grpo", "sapo"])
def test_a_value_out_of_range_is_reported_under_the_name_that_was_typed(run, name):
    own = {s.key: s for s in numeric(algorithm_settings(name, {name: schema(name)}).values())}
    settings = own if name == "sapo" else own | {s.key: s for s in numeric(schema_settings().values())}
    targets = {spelling: key for spelling, key in ALIASES.items() if key in settings and spelling != key}
    assert set(targets.values()) >= {"algorithm.tau_pos"} if name == "sapo" else len(targets) > 60
    for group in rounds(targets):
        with pytest.raises(InputError) as error:
            run(f"algorithm={name}", *(f"{spelling}=nan" for spelling in group))
        assert refused(error.value) == set(group)
        for spelling, key in group.items():
            assert f"{spelling} must be {settings[key].allowed}, got nan  (= {key})\n" in str(error.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["algorithm.gvpo_beta=nan"],
            "algorithm.gvpo_beta must be a number above 0 and at most 1,000,000, got nan",
        ),
        (["trainer.save_freq=-inf"], "trainer.save_freq must be a whole number from 0 to"),
        (["algorithm=dapo", "filter_groups.max_num_gen_batches=-inf"], "filter_groups.max_num_gen_batches must be a"),
        (["algorithm=grpo", "actor.use_kl_loss=true", "actor.kl_loss_coef=nan"], "actor.kl_loss_coef must be a number"),
        (
            ["algorithm=grpo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=-1"],
            "algorithm.kl_ctrl.kl_coef must be a number from 0 to 1,000,000, got -1.0  (= algorithm.kl_coef)",
        ),
        (["algorithm=grpo", "actor.clip_ratio=-1"], "actor.clip_ratio must be a number from 0 to 1e+30, got -1"),
        (["data.max_response_length=0"], "data.max_response_length must be a whole number from 1 to 10,000,000, got 0"),
        (["train_model.lora.r=-1"], "train_model.lora.r must be a whole number from 0 to 4,096, got -1  (= model.lora"),
        (["trainer.n_gpus_per_node=nan"], "trainer.n_gpus_per_node must be a whole number from 1, got nan"),
        (["trainer.nnodes=inf"], "trainer.nnodes must be a whole number from 1, got inf"),
        (["train_model.num_devices=some"], "train_model.num_devices must be a whole number from 1, got some"),
        (["train.dialog_turns_per_batch=nan"], "train.dialog_turns_per_batch must be a whole number from 1, got nan"),
        (["train.total_dialog_turns=-inf"], "train.total_dialog_turns must be a whole number from 1, got -inf"),
        (["train.gradient_accumulation_steps=0"], "train.gradient_accumulation_steps must be a whole number from 1"),
        (
            ["train.dialog_turns_per_batch=80000000"],
            "train.dialog_turns_per_batch=80000000: data.train_batch_size must be a whole number from 1 to 1,000,000, "
            "got 10000000\n",
        ),
        (
            ["trainer.n_gpus_per_node=1000000", "trainer.nnodes=2"],
            "trainer.n_gpus_per_node=1000000: cluster.learner_devices must be a whole number from 1 to 100,000, "
            "got 2000000\n",
        ),
        (["env.AGENT_MAX_TIMEOUT=nan"], "env.AGENT_MAX_TIMEOUT must be a number from 0.001 to 1,000,000, got nan"),
    ],
)
def test_settings_that_other_vocabularies_compute(run, words, text):
    with pytest.raises(InputError) as error:
        run(*words)
    assert str(error.value).startswith(text)


# --- where values come from --------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_in_one_error(run):
    with pytest.raises(InputError) as error:
        run("optimizer.lr=nan", "learner.beta1=2", "rollout.n=0", "loop.total_steps=soon", "trainer.nnodes=0")
    assert str(error.value).splitlines() == [
        "loop.total_steps must be a whole number from 1 to 1,000,000,000, or null, got 'soon'",
        "  the default is null; more: covey config explain loop.total_steps",
        "trainer.nnodes must be a whole number from 1, got 0",
        "rollout.n must be a whole number from 1 to 65,536, got 0  (= rollout.group_size)",
        "  the default is 8; more: covey config explain rollout.group_size",
        "optimizer.lr must be a number from 0 to 10, got nan  (= learner.lr)",
        "  the default is 1e-05; more: covey config explain learner.lr",
        "learner.beta1 must be a number at least 0 and below 1, got 2.0",
        "  the default is 0.9; more: covey config explain learner.beta1",
    ]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400", '"nan"', "-1"])
def test_a_file_of_settings_is_named_with_its_line(run, value):
    with pytest.raises(InputError, match=r"my\.yaml, line 3: learner\.lr must be a number from 0 to 10, got "):
        run(file=f"seed: 1\nlearner:\n  lr: {value}\n")


def test_a_reference_is_followed(run):
    with pytest.raises(InputError, match=r"learner\.beta1 must be a number at least 0 and below 1, got 3\.0"):
        run("learner.beta1=${learner.lr}", "learner.lr=3")
    with pytest.raises(InputError, match=r"reward\.weights\.a must be a number .*, got 'high'"):
        run("reward.weights=${data.options}", "data.options.a=high")


def test_one_entry_of_a_table_or_list_is_enough(run):
    with pytest.raises(InputError, match=r"^reward\.weights\.b must be a number from -1,000,000 to 1,000,000, got inf"):
        run("reward.weights={a: 1, b: inf}")
    with pytest.raises(InputError, match=r"^rollout\.devices must be a whole number from 0 to 1,023 in every entry"):
        run("rollout.devices=[0,-1]")
    with pytest.raises(InputError, match=r"^rollout\.stop must be text .*\n  an empty text would end every answer"):
        run('rollout.stop=["\\n",""]')


def test_tasks_times_attempts_are_bounded(run):
    assert run("data.train_batch_size=100000", "rollout.group_size=10").config.rollout.group_size == 10
    with pytest.raises(InputError) as error:
        run("data.train_batch_size=100000", "actor_rollout_ref.rollout.n=11")
    assert str(error.value) == (
        "data.train_batch_size=100000 and actor_rollout_ref.rollout.n=11 make 1,100,000 episodes in one step, and "
        "the maximum is 1,000,000\n  lower one of them"
    )


# --- the declaration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "text", "members", "others"),
    [
        (Range(0, 1), "from 0 to 1", [0, 1, 0.5, -0.0], [-1e-9, 1.0000001, 10**400, -(10**400)]),
        (Range(0, 1, above=True), "above 0 and at most 1", [1e-300, 1], [0, -0.0, 1.1]),
        (Range(0, 1, below=True), "at least 0 and below 1", [0, 0.999], [1, -1]),
        (Range(1, 65_536), "from 1 to 65,536", [1, 65_536], [0, 65_537]),
        (Range(1, 1e30, above=True), "above 1 and at most 1e+30", [2, 1e30], [1, 1e31]),
    ],
)
def test_a_range(within, text, members, others):
    assert str(within) == text
    assert [value for value in members if value not in within] == []
    assert [value for value in (*others, math.nan, math.inf, -math.inf) if value in within] == []


def test_what_an_annotation_allows():
    for hint, text, kind in (
        (Tokens, "a whole number from 1 to 10,000,000", "int"),
        (Tokens | None, "a whole number from 1 to 10,000,000, or null", "int | None"),
        (list[Tokens] | None, "a whole number from 1 to 10,000,000 in every entry, or null", "list[int] | None"),
        (dict[str, Annotated[float, Range(0, 1)]], "a number from 0 to 1 in every entry", "dict[str, float]"),
    ):
        assert (str(allowed(hint)), type_text(hint)) == (text, kind)
    assert (None in allowed(Tokens), None in allowed(Tokens | None)) == (False, True)
    assert (True in allowed(Tokens), 1.0 in allowed(Tokens), "1" in allowed(Tokens)) == (False, False, False)
    assert allowed(float) is allowed(dict[str, float] | None) is None


def test_a_dataclass_checks_itself():
    @dataclass(frozen=True)
    class Section:
        one: Annotated[float, Range(0, 1)] = 0.5
        two: Tokens | None = None

        def __post_init__(self) -> None:
            check_ranges(self, "my.")

    assert Section(two=3).two == 3
    with pytest.raises(InputError) as error:
        Section(math.nan, 0)
    assert str(error.value).splitlines() == [
        "my.one must be a number from 0 to 1, got nan",
        "my.two must be a whole number from 1 to 10,000,000, or null, got 0",
    ]


@pytest.mark.parametrize("values", [{"temperature": math.nan}, {"stop": ("",)}, {"max_tokens": 0}, {"top_p": 0.0}])
def test_sampling_is_bounded_too(values):
    (name,) = values
    with pytest.raises(ValueError, match=f"^{name} must be "):
        Sampling(**values)
