"""Settings, files of settings and command lines of any content: a configuration, or an error that says what to mend."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import strategies as st

from covey.algorithms import ALGORITHMS as CATALOGUE
from covey.algorithms import schema
from covey.cli.main import main
from covey.config import compose, expand_sweep
from covey.config.aliases import ALIASES, NO_EFFECT, PARTS
from covey.config.compose import fingerprint
from covey.config.explain import explain
from covey.config.read import read_env_file
from covey.config.settings import schema_settings
from covey.errors import InputError
from tests.faults.fuzzing import Target, json_values, mixed, suite, texts

ALGORITHMS: dict[str, type] = {name: schema(name) for name in CATALOGUE}
KEYS = [
    *schema_settings(),
    *ALIASES,
    *PARTS,
    *NO_EFFECT,
    "algorithm",
    "algorithm.beta",
    "algorithm.loss",
    "env.X",
    "hydra",
]
KEYS += [
    "algorithm.gvpo_beta",
    "algorithm.adv_estimator",
    "algorithm.kl_coef",
    "data",
    "model",
    "reward",
    "agent",
    "mode",
]
VALUES = ["1", "-1", "0", "1e999", "nan", "-inf", "null", "true", "[]", "{}", "[1,2]", "{a:1}", "1,2", "range(3)", "''"]
VALUES += [
    "${model.name}",
    "${data.name}",
    "${rollout.group_size}",
    "${oc.env:HOME}",
    "${a",
    "${X}",
    "???",
    "grpo",
    "gvpo",
]
VALUES += ["1e-5", "0x10", "1_000", "9" * 5000, "[" * 200, "{a:{b:{c:1}}}", "'a b'", '"', "a:b.py", "sort", "sort(1)"]
VALUES += [
    "choice(1,2)",
    "glob(*)",
    "interval(0,1)",
    "exact",
    "cuda:99",
    "é",
    "\x00",
    "1" + "0" * 400,
    "int(x)",
    "auto",
]

keys = st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key + "x"), texts)
values = st.one_of(st.sampled_from(VALUES), texts, mixed(VALUES, 4))
words = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "++", "~", "-"]), keys, values),
    st.sampled_from(["", "=", "~a", "a", "==", "+=", "a@b=c", "a=b=c", "@", "a.=1", ".a=1", "a..b=1", "[=]", "'='"]),
    texts,
)


def composes(given: list[str]) -> None:
    try:
        composed = compose(given, algorithms=ALGORITHMS)
    except InputError as error:
        _told(error)
        return
    fingerprint(composed.tree)
    assert yaml.safe_load(yaml.safe_dump(composed.tree)) is not None
    # What it says it was given makes the same configuration again.
    again = compose(composed.overrides, algorithms=ALGORITHMS)
    assert _same(again.tree, composed.tree), (composed.overrides, again.overrides)


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


def sweeps(given: list[str]) -> None:
    try:
        runs = expand_sweep(given)
    except InputError as error:
        _told(error)
    else:
        assert runs


def explains(key: str) -> None:
    try:
        assert explain(key, ALGORITHMS)
    except InputError as error:
        _told(error)


def _told(error: InputError) -> None:
    text = str(error)
    assert text.strip()
    assert len(text) < 12_000, len(text)
    assert "Traceback" not in text


# -- files -----------------------------------------------------------------------------------------------------------

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
MAPPING_BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{{', '.join(f'k{i}: *{chr(97 + n)}' for i in range(9))}}}\n" for n in range(9)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join([f'*{chr(97 + n)}'] * 9)}]}}\n" for n in range(9)
)
PIECES = [
    "a: 1\n",
    "model:\n",
    "  name: x\n",
    "- ",
    "? ",
    ": ",
    "&a ",
    "*a",
    "<<: *a\n",
    "!!python/object:os.system ",
    "!!set ",
]
PIECES += [
    "{",
    "}",
    "[",
    "]",
    "|\n",
    ">\n",
    "'",
    '"',
    "\t",
    "#",
    "---\n",
    "...\n",
    "%YAML 1.1\n",
    "env:\n  X: 1\n",
    "${X}",
]
PIECES += [
    "python_args:\n",
    "defaults:\n",
    "  - override algorithm: grpo\n",
    "rollout.group_size: ",
    "1e-6",
    "2020-01-01",
    "~",
]
PIECES += [
    "x: &x {y: *x}\n",
    "reward.options: &r {r: *r}\n",
    "0b1",
    "1:30",
    "!!binary a",
    "!!int x",
    "!!timestamp x",
    "\x85",
]
trees = json_values(["model", "name", "data", "env", "X", "python_args", "defaults", "algorithm", "reward", "options"])
yaml_texts = st.one_of(
    mixed(PIECES),
    trees.map(lambda tree: yaml.dump(tree, allow_unicode=True)),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES) | trees, max_size=4).map(yaml.dump),
    st.sampled_from(
        [BOMB, MAPPING_BOMB, MERGE_BOMB, "[" * 3000, "{a: " * 3000, "- " * 3000, "a: &a [*a]", "a: " + "9" * 5000]
    ),
    st.sampled_from(
        ["reward.options: &o {a: *o}", "data.options: " + "[" * 500 + "]" * 500, "a: {" + "b: {" * 200 + "}" * 201]
    ),
    texts,
)
yaml_files = st.one_of(
    yaml_texts.map(lambda text: text.encode(errors="replace")),
    yaml_texts.map(lambda t: t.encode("utf-16", "replace")),
    st.binary(max_size=60),
)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def reads_files(data: bytes) -> None:
    with _folder() as folder, mock.patch.dict(os.environ):
        path = folder / "my.yaml"
        path.write_bytes(data)
        try:
            composed = compose([], algorithms=ALGORITHMS, config_path=path)
        except InputError as error:
            _told(error)
        else:
            fingerprint(composed.tree)


LINES = [
    "export ",
    "A=",
    "B=$A",
    "${A}",
    "'",
    '"',
    "#",
    " ",
    "\\",
    "$",
    "=",
    "\n",
    "~",
    "~nobody",
    "é",
    "\x00",
    "A=1\n",
    "${",
]


def reads_env_file(data: bytes) -> None:
    with _folder() as folder, mock.patch.dict(os.environ):
        path = folder / ".env"
        path.write_bytes(data)
        try:
            found = read_env_file(path)
            from covey.config.read import export

            export(found)
        except InputError as error:
            assert ".env" in str(error)


# -- command lines ---------------------------------------------------------------------------------------------------

COMMANDS = ["config", "algorithms", "data", "runs", "watch", "report", "train", "sft", "slurm", "simulate", "eval"]
FLAGS = [
    "--config",
    "--config-name",
    "--validate-only",
    "--dry-run",
    "--multirun",
    "-n",
    "--help",
    "explain",
    "show",
    "check",
]
FLAGS += [
    "--launcher",
    "--unfinished",
    "--nodes",
    "--gpus",
    "prepare",
    "demo",
    "gsm8k",
    "--tasks",
    "--from",
    "--out",
    "-",
    "--",
]
arguments = st.lists(st.one_of(st.sampled_from(FLAGS), words, texts), max_size=4)


def commands(given: tuple[str, list[str]]) -> None:
    """Nothing is started: train and sft only check, and the folder is empty."""
    name, rest = given
    checking = ["--validate-only"] if name in ("train", "sft") else []
    if name in ("eval", "simulate") and not any(word.startswith("-") for word in rest):
        rest = ["--nosuchflag", *rest]
    runs([name, *checking, *[word for word in rest if word not in ("--multirun", "--dry-run")]])


def runs(words: Sequence[str]) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as a console's
    here = os.getcwd()
    with _folder() as folder, redirect_stdout(out), redirect_stderr(out), mock.patch.dict(os.environ):
        os.chdir(folder)
        try:
            assert main(words) in (0, 1, 2)
        finally:
            os.chdir(here)


BASE = ["model=tiny-nowhere", "data=sort", "data.train_size=4", "data.val_size=2"]


def validates(given: list[str]) -> None:
    runs(["train", "--validate-only", *BASE, *given])


sized = st.builds("{}={}".format, st.sampled_from(sorted(schema_settings())), st.sampled_from(VALUES))
TARGETS = [
    Target("config/overrides", st.lists(words, min_size=1, max_size=3), composes, 80),
    Target("config/sweeps", st.lists(words, max_size=3), sweeps, 60),
    Target("config/explain", keys, explains, 60),
    Target("config/files", yaml_files, reads_files, 60),
    Target(
        "config/dotenv",
        st.one_of(mixed(LINES).map(lambda t: t.encode(errors="replace")), st.binary(max_size=30)),
        reads_env_file,
        100,
    ),
    Target("config/commands", st.tuples(st.sampled_from(COMMANDS), arguments), commands, 25),
    Target("config/validate", st.lists(sized, min_size=1, max_size=2), validates, 15),
]
test_fuzz = suite(TARGETS)


@pytest.mark.parametrize("text", [BOMB, MAPPING_BOMB, MERGE_BOMB])
def test_a_file_that_multiplies_itself_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bomb\.yaml"):
        compose([], algorithms=ALGORITHMS, config_path=path)
