"""The guides for people who come from elsewhere: their tables of keys are what the configuration really does.

PYTHONPATH=src python -m tests.config.test_guides       write the tables anew
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.config import recipe_names
from covey.config.aliases import ALIASES, NO_EFFECT, no_effect, translate
from covey.config.derive import PARTS, UNSUPPORTED
from covey.config.settings import find, owners, schema_settings
from tests.config.conftest import ALGORITHMS

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
GVPO = [f"algorithm.gvpo_{name}" for name in ("beta", "use_bessel_correction", "clip_weight", "normalize_weights")]
DGDO = [
    f"algorithm.dgdo_{name}"
    for name in (
        *("beta", "warmup_steps", "beta_start", "beta_warmup_steps", "min_weight"),
        *("epsilon", "invert", "importance_priors"),
    )
]
KNOWN = sorted({*ALIASES, *PARTS, *NO_EFFECT, *(row.key for row in UNSUPPORTED)})
VERL = ("actor_rollout_ref.", "algorithm.", "trainer.", "data.", "reward_model.overlong_buffer.", "agentflow.", "env.A")
TORCHRL = ("env.", "train.", "train_model.", "ref_model.", "inference_model.", "optimizer.", "policy.", "model.compile")


def _foreign(key: str) -> bool:
    target = translate(key, ALGORITHMS)
    return target is not None and (target.key != key or not _native(key))


def _native(key: str) -> bool:
    return find(key, schema_settings()) is not None or bool(owners(key, ALGORITHMS))


def _starting(*prefixes: str) -> Callable[[str], bool]:
    return lambda key: key.startswith(prefixes) and _foreign(key)


KEYS: dict[str, list[str]] = {
    "from-verl": [*GVPO, *filter(_starting(*VERL, "critic.model.path", "critic.optim.lr", "critic.cliprange"), KNOWN)],
    "from-agentfly": [
        k for k in KNOWN if k.startswith("agent.") and k != "agent.opponent" and "init_" not in k and _foreign(k)
    ],
    "from-torchrl": [k for k in KNOWN if _starting(*TORCHRL)(k) and not re.match(r"env\.[A-Z]", k)],
    "from-trl": [k for k in KNOWN if "." not in k and not k.startswith("clip_ratio")],
    "from-gdpo": [
        *DGDO,
        *(k for k in KNOWN if k.startswith(("filter_groups.", "clip_ratio", "val_kwargs."))),
        *(f"actor_rollout_ref.{k}" for k in ("actor.ppo_mini_batch_size", "rollout.gpu_memory_utilization")),
        *("data.max_response_length", "trainer.n_gpus_per_node", "trainer.nnodes"),
    ],
}


def row(key: str) -> str:
    """theirs | Covey's own | remark"""
    target = translate(key, ALGORITHMS)
    assert target is not None, key
    parts = PARTS.get(target.key)
    missing = [line for line in UNSUPPORTED if line.key == target.key]
    remark = no_effect(target.key)
    if parts is not None:
        native, text = parts
    elif _native(target.key):
        native, text = (target.key,), ""
    elif missing:
        native, text = (), f"not supported yet beyond its default: {missing[0].feature}"
    else:
        assert remark is not None, key
        native, text = (), remark.remark.format(algorithm="the algorithm") or "accepted, without effect"
    return f"| `{key}` | {', '.join(f'`{name}`' for name in native)} | {text} |"


def table(keys: list[str]) -> str:
    return "\n".join(["| theirs | Covey's own key | remark |", "|---|---|---|", *map(row, keys)]) + "\n"


def written(page: Path) -> str:
    return page.read_text().partition(BEGIN)[2].partition(END)[0]


@pytest.mark.parametrize("guide", KEYS)
def test_the_table_of_keys_is_what_is_done(guide: str) -> None:
    assert written(DOCS / "guides" / f"{guide}.md") == table(KEYS[guide])


def test_the_arguments_of_the_minimal_script() -> None:
    rows = re.findall(
        r"^\| `(\w+)[^|]*\| `([\w.]+)` ", (DOCS / "guides/from-minimal-gvpo.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {
        "model": "model.name",
        "beta": "algorithm.beta",
        "num_samples_per_prompt": "rollout.group_size",
        "reward_function": "reward.name",
    }
    assert all(_native(key) for _, key in rows)


def test_every_recipe_has_a_line() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert re.findall(r"^\| `([^`]+)`", text, re.MULTILINE) == sorted(
        recipe_names(), key=lambda name: text.index(f"| `{name}`")
    )
    assert all(f"| `{name}`" in text for name in recipe_names())


if __name__ == "__main__":
    for name, keys in KEYS.items():
        path = DOCS / "guides" / f"{name}.md"
        before, _, rest = path.read_text().partition(BEGIN)
        path.write_text(before + BEGIN + table(keys) + END + rest.partition(END)[2])
