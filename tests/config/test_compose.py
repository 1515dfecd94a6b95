"""The recipe, the file and the command line become one frozen configuration."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from dataclasses import dataclass

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore

from covey.config import Config, compose, expand_sweep, fingerprint
from covey.config.compose import ADDED
from covey.errors import InputError


def message(error: pytest.ExceptionInfo[InputError]) -> str:
    return str(error.value)


# --- values ------------------------------------------------------------------------------------------------------


def test_no_arguments_gives_the_defaults_with_gvpo(run, algorithms):
    composed = run()
    assert composed.config == dataclasses.replace(Config(), algorithm=algorithms["gvpo"]())
    assert composed.overrides == composed.warnings == ()
    assert composed.env == {}


def test_hydra_grammar_reads_the_values(run):
    config = run(
        "learner.lr=2e-5",
        "rollout.stop=[END,'a, b']",
        "reward.weights={exact: 1, length: 0.5}",
        "model.context_length=null",
        "data.system_prompt='say: \"yes\"'",
        "+loop.total_steps=1e3",
    ).config
    assert config.learner.lr == 2e-5
    assert config.rollout.stop == ["END", "a, b"]
    assert config.reward.weights == {"exact": 1.0, "length": 0.5}
    assert config.model.context_length is None
    assert config.data.system_prompt == 'say: "yes"'
    assert config.loop.total_steps == 1000


def test_a_section_word_is_short_for_its_name(run):
    config = run("model=my/model", "data=sort", "reward=[exact,my.py:fn]", "agent=my.py:fn", "algorithm=grpo").config
    assert config.model.name == "my/model"
    assert config.data.name == "sort"
    assert config.reward.name == ["exact", "my.py:fn"]
    assert config.agent.name == "my.py:fn"
    assert config.agent.max_seconds == 500.0
    assert config.algorithm.name == "grpo"


def test_options_of_tasks_and_weights_of_rewards_are_free_keys(run):
    config = run("data.options.length=5", "data.options.alphabet.size=3", "reward.weights.exact=2").config
    assert config.data.options == {"length": 5, "alphabet": {"size": 3}}
    assert config.reward.weights == {"exact": 2.0}


def test_the_same_spelling_twice_means_the_later(run):
    assert run("learner.lr=1", "learner.lr=2").config.learner.lr == 2.0
    assert run("optimizer.lr=1", "optimizer.lr=2").config.learner.lr == 2.0


def test_one_value_is_enough_for_a_list(run):
    assert run("logging.to=wandb").config.logging.to == ["wandb"]


def test_a_setting_may_refer_to_another(run):
    composed = run("learner.mini_batch_size=${data.train_batch_size}", "data.train_batch_size=6")
    assert composed.config.learner.mini_batch_size == 6
    assert composed.tree["learner"]["mini_batch_size"] == 6


def test_the_configuration_is_frozen(run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        run().config.learner.lr = 1.0


# --- layers ------------------------------------------------------------------------------------------------------


def test_command_line_beats_file_beats_recipe(run):
    config = run("optimizer.lr=3", file="learner: {lr: 2, eps: 1e-6}\nrollout.n: 4").config
    assert (config.learner.lr, config.learner.eps, config.rollout.group_size) == (3.0, 1e-6, 4)
    assert config.learner.beta1 == 0.9


def test_a_later_layer_may_use_another_spelling(run):
    assert run("loop.total_epochs=2", file="trainer.total_epochs: 5").config.loop.total_epochs == 2
    assert run("trainer.total_epochs=2", file="loop: {total_epochs: 5}").config.loop.total_epochs == 2


def test_free_keys_of_layers_add_up(run):
    assert run("data.options.b=3", file="data: {options: {a: 1, b: 2}}").config.data.options == {"a": 1, "b": 3}


def test_what_is_unavailable_in_a_file_can_be_switched_off_on_the_command_line(run):
    assert run("rollout=embedded", file="actor_rollout_ref.rollout.name: vllm").config.rollout.name == "embedded"


def test_settings_of_an_algorithm_stay_behind_when_a_later_layer_chooses_another(run):
    composed = run("algorithm=grpo", file="algorithm: {name: gvpo, beta: 0.2}")
    assert composed.config.algorithm.name == "grpo"
    (warning,) = composed.warnings
    assert "my.yaml, line 1: algorithm.beta was set for gvpo and has no effect with algorithm=grpo" in warning


def test_a_file_may_set_what_only_the_command_lines_algorithm_has(run):
    assert run("algorithm=grpo", file="algorithm.kl_coef: 0.3").config.algorithm.kl_coef == 0.3


def test_the_resolved_tree_is_a_configuration_file(run):
    first = run(
        "algorithm=grpo", "learner.lr=3e-6", "reward.weights={a: 0.5}", "data.options.n=3", "logging.to=[wandb]"
    )
    assert run(file=yaml.safe_dump(first.tree)).config == first.config
    assert json.loads(json.dumps(first.tree)) == first.tree


def test_overrides_are_native_and_give_the_same_configuration_again(run, algorithms):
    words = [
        "algorithm.adv_estimator=grpo",
        "optimizer.lr=1e-4",
        "agent=my.py:fn",
        "trainer.logger=['console','wandb']",
    ]
    words += [
        r"data.system_prompt='it\'s \\ 50%\\'",
        "data.val_files=./a b.json",
        "reward.weights={x: 0.5}",
        "model='5'",
    ]
    words += ["actor_rollout_ref.actor.use_kl_loss=True", "loop.total_steps=null"]
    first = run(*words)
    assert first.overrides[:2] == ("algorithm=grpo", "learner.lr=0.0001")
    assert first.overrides[-1] == "algorithm.kl_coef=0.001"
    again = compose(first.overrides, algorithms=algorithms)
    assert (again.config, again.overrides) == (first.config, first.overrides)


# --- recipes and Hydra -------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Makes a package of recipes and looks there. It gets a name of its own, because packages are read once."""
    package = f"recipes_of_{tmp_path.name}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    # `covey.config.compose` is the function; the module of that name holds the constant.
    monkeypatch.setattr(sys.modules["covey.config.compose"], "RECIPES", package)
    return lambda text, name="mine": (folder / f"{name}.yaml").write_text(text)


def test_a_recipe_chooses_and_sets(run, recipe):
    recipe("defaults: [schema, override algorithm: grpo, _self_]\nalgorithm: {kl_coef: 0.3}\nlearner: {lr: 1e-6}")
    config = run("rollout.group_size=4", config_name="mine").config
    assert (config.algorithm.name, config.algorithm.kl_coef, config.algorithm.clip_low) == ("grpo", 0.3, 0.2)
    assert (config.learner.lr, config.rollout.group_size) == (1e-6, 4)


def test_a_recipe_builds_on_another(run, recipe):
    recipe("defaults: [schema, _self_]\nseed: 3\nlearner: {lr: 1}", name="base")
    recipe("defaults: [base, _self_]\nlearner: {lr: 2}")
    config = run(config_name="mine").config
    assert (config.seed, config.learner.lr) == (3, 2.0)


def test_another_algorithm_replaces_the_recipes_with_its_settings(run, recipe):
    recipe("defaults: [schema, _self_]\nalgorithm: {beta: 0.3}")
    composed = run("algorithm=grpo", config_name="mine")
    assert composed.config.algorithm.kl_coef == 0.0
    assert composed.warnings == ("algorithm=grpo replaces the recipe's gvpo and its settings: beta",)


def test_a_recipe_chooses_a_loss_and_sets_it(run, recipe):
    recipe("defaults: [schema, override algorithm: grpo+sapo, _self_]\nalgorithm: {tau_pos: 2, kl_coef: 0.3}")
    composed = run(config_name="mine")
    chosen = composed.config.algorithm
    assert (chosen.name, chosen.loss, chosen.tau_pos, chosen.tau_neg, chosen.kl_coef) == ("grpo", "sapo", 2, 1.05, 0.3)
    assert composed.warnings == ()
    later = run("algorithm.tau_neg=3", config_name="mine").config.algorithm
    assert (later.tau_pos, later.tau_neg) == (2.0, 3.0)


def test_another_loss_replaces_the_recipes_with_its_settings(run, recipe):
    recipe("defaults: [schema, override algorithm: grpo, _self_]\nalgorithm: {clip_low: 0.1, kl_coef: 0.3}")
    composed = run("algorithm.loss=gspo", config_name="mine")
    assert (composed.config.algorithm.clip_low, composed.config.algorithm.kl_coef) == (3e-4, 0.3)
    assert composed.warnings == ("algorithm.loss=gspo replaces the recipe's loss=ppo_clip and its settings: clip_low",)


def test_a_recipes_loss_without_settings_of_its_own(run, recipe):
    recipe("defaults: [schema, override algorithm: grpo, _self_]\nalgorithm: {loss: gspo, kl_coef: 0.3}")
    composed = run(config_name="mine")
    assert (composed.config.algorithm.clip_low, composed.config.algorithm.kl_coef) == (3e-4, 0.3)
    assert composed.warnings == ()
    back = run("algorithm.loss=ppo_clip", config_name="mine").config.algorithm
    assert (back.loss, back.clip_low, back.dual_clip, back.kl_coef) == ("ppo_clip", 0.2, 3.0, 0.3)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("defaults: [schema, override algorithm: grpo+gvpo, _self_]", "Could not find 'algorithm/grpo+gvpo'"),
        ("defaults: [schema, _self_]\nlearnr: {lr: 1}", "Key 'learnr'"),
        ("defaults: [schema, _self_]\nlearner: {lr: abc}", "learner.lr"),
        ("defaults: [schema, override algorithm: no, _self_]", "mine"),
        ("defaults: [schema, override algorithm: grppo, _self_]", "Could not find 'algorithm/grppo'"),
        ("a: [", "line 1"),
    ],
)
def test_a_wrong_recipe_is_named(run, recipe, text, part):
    recipe(text)
    with pytest.raises(InputError) as error:
        run(config_name="mine")
    assert message(error).startswith("the recipe mine cannot be read")
    assert part in message(error)


def test_an_unknown_recipe(run):
    with pytest.raises(InputError, match=r"unknown recipe  defalt\n  did you mean   default\?"):
        run(config_name="defalt")


def test_other_algorithms_in_the_same_process(run, algorithms):
    @dataclass(frozen=True)
    class Mine:
        name: str = "mine"
        tau: float = 1.5

    assert run("algorithm=grpo").config.algorithm.name == "grpo"
    config = compose(["algorithm=mine", "algorithm.tau=2"], algorithms={**algorithms, "mine": Mine}).config
    assert config.algorithm == Mine(tau=2.0)
    with pytest.raises(InputError, match="unknown algorithm  mine"):
        run("algorithm=mine")


def test_hydra_is_left_as_it_was(algorithms, tmp_path):
    another = type("Another", (algorithms["gvpo"],), {})  # never composed before, so that Hydra has to
    (tmp_path / "app.yaml").write_text("a: 1")
    ConfigStore.instance().store(group="algorithm", name="somebody", node={"x": 1})
    before = ConfigStore.instance().repo
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose([], algorithms={**algorithms, "another": another})
        assert hydra_compose(config_name="app") == {"a": 1}
    assert ConfigStore.instance().repo is before
    assert list(before["algorithm"]) == ["somebody.yaml"]
    del before["algorithm"]


# --- mistakes ----------------------------------------------------------------------------------------------------


def test_unknown_setting_of_an_algorithm(run):
    with pytest.raises(InputError) as error:
        run("algorithm.gvpo_bta=0.2")
    assert message(error) == (
        "unknown setting  algorithm.gvpo_bta\n"
        "  did you mean   algorithm.gvpo_beta  (= algorithm.beta for gvpo; default 0.1)?\n"
        "  all settings of gvpo: covey config explain algorithm=gvpo"
    )


@pytest.mark.parametrize(
    ("word", "guess", "listing"),
    [
        ("learner.lrr=1", "learner.lr  (default 1e-05)", "all settings of learner: covey config explain learner"),
        ("lr=1", "learner.lr  (default 1e-05)", "all settings of learner: covey config explain learner"),
        ("optimizr.lr=1", "optimizer.lr  (= learner.lr; default 1e-05)", "covey config explain learner"),
        ("algorithm.bta=1", "algorithm.beta  (default 0.1)", "covey config explain algorithm=gvpo"),
        ("agentflow.prt=1", "agentflow.port  (= gateway.port; default 9999)", "covey config explain gateway"),
        ("data.option.n=1", "data.options.n", "all settings of data: covey config explain data"),
        ("something.else=1", None, "all settings: covey config explain"),
        ("learner.foo=1", None, "all settings of learner"),
        ("critic.warmup_step=5", "critic.warmup_steps  (default 0)", "all settings of critic"),
        ("critic.ppo_epoch=5", "critic.ppo_epochs", "all settings of critic"),
    ],
)
def test_unknown_settings_name_the_nearest(run, word, guess, listing):
    with pytest.raises(InputError) as error:
        run(word)
    assert message(error).startswith(f"unknown setting  {word.partition('=')[0]}\n")
    assert listing in message(error).splitlines()[-1]
    assert ("did you mean" in message(error)) == (guess is not None)
    assert guess is None or guess in message(error)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["learner=3"], "learner is a section, not a setting\n  all settings of learner: covey config explain learner"),
        (["algorithm=grp"], "unknown algorithm  grp\n  did you mean   grpo?\n  known: cispo, clip_cov, dapo"),
        (["mode=syncc"], "unknown mode  syncc\n  did you mean   sync?\n  known: async, sync"),
        (["agent=chatt"], "unknown agent  chatt\n  did you mean   chat?\n  known: chat, code, flow"),
        (["rollout=embed"], "unknown rollout  embed\n  did you mean   embedded?\n  known: auto, embedded, vllm"),
        (["learner.lr=abc"], "learner.lr must be a number from 0 to 10, got 'abc'\n  the default is 1e-05"),
        (["optimizer.lr=abc"], "optimizer.lr must be a number from 0 to 10, got 'abc'  (= learner.lr)\n"),
        (["loop.total_steps=1.5"], "loop.total_steps must be a whole number from 1 to 1,000,000,000, or null, got 1.5"),
        (["seed=null"], "seed must be a whole number from -1e+18 to 1e+18, got null"),
        (["reward.weights.a=high"], "reward.weights.a must be a number from -1,000,000 to 1,000,000, got 'high'"),
        (
            ["algorithm=grpo", "algorithm.beta=1"],
            "algorithm.beta is a setting of gvpo, dgdo and online_dpo, and the algorithm is grpo\n  all",
        ),
        (["learner.lr=1,2"], "learner.lr=1,2  has several values\n  to run all of them, add --multirun; a list is"),
        (["train"], "train  is not a setting\n  settings are written key=value"),
        (["data.val_files=a=b"], "data.val_files=a=b  cannot be read: mismatched input '='"),
        (["~learner.lr"], "~learner.lr  would remove a setting\n  give it a value instead"),
        (["algorithm@x=grpo"], "algorithm@x=grpo  names a package\n  write algorithm="),
        (["seed=${nothing.here}"], "Interpolation key 'nothing.here' not found"),
        (["model.dtype=float33"], "unknown value of model.dtype  float33\n  did you mean   float32?"),
        (
            ["rollout.temperature=0"],
            "rollout.temperature must be a number from 0.001 to 100, got 0.0\n  greedy answers",
        ),
    ],
)
def test_mistakes_are_told_with_their_fix(run, words, text):
    with pytest.raises(InputError) as error:
        run(*words)
    assert message(error).startswith(text)


@pytest.mark.parametrize(
    "words",
    [
        ("learner.lr=1e-5", "optimizer.lr=1e-4"),
        ("agent.model_name_or_path=a", "actor_rollout_ref.model.path=b"),
        ("algorithm=gvpo", "algorithm.adv_estimator=grpo"),
        ("algorithm.beta=0.1", "gvpo_beta=0.2"),
    ],
)
def test_two_spellings_that_disagree(run, words):
    """A command line's later word wins, so that settings can be appended; the lines of a file have no order."""
    one, other = words
    assert run(*words).config == run(other).config
    assert run(other, one).config == run(one).config
    assert any("is replaced by" in text and "which comes later" in text for text in run(*words).warnings)
    with pytest.raises(InputError) as error:
        run(file="\n".join(word.replace("=", ": ") for word in words))
    for word in words:
        assert word.partition("=")[0] in message(error)
    assert message(error).startswith("two spellings of one setting disagree\n")


def test_steps_and_epochs_the_users_replace_the_recipes(run):
    for words in (["trainer.total_training_steps=1"], ["loop.total_steps=1"]):
        loop = run(*words, config_name="gvpo_math").config.loop
        assert (loop.total_steps, loop.total_epochs) == (1, None)
    loop = run("trainer.total_epochs=2", config_name="grpo_gsm8k").config.loop
    assert (loop.total_steps, loop.total_epochs) == (None, 2)
    loop = run("loop.total_steps=3", file="trainer.total_epochs: 2").config.loop
    assert (loop.total_steps, loop.total_epochs) == (3, None)
    assert run(config_name="gvpo_math").config.loop.total_epochs == 5


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.dgdo_importance_priors={exact: 2.0, short: 0.5}"],
        ["dgdo_importance_priors={exact: 2.0, short: 0.5}"],
        ["algorithm.dgdo_importance_priors.exact=2", "algorithm.importance_priors.short=0.5"],
        ["algorithm.importance_priors={exact: 2.0, short: 0.5}"],
    ],
)
def test_priors_by_the_name_of_a_reward(run, words):
    expected = {"exact": 2.0, "short": 0.5}
    assert run("algorithm=dgdo", *words).config.algorithm.importance_priors == expected
    lines = "".join(f"{key}:\n  exact: 2.0\n  short: 0.5\n" for key in ["algorithm.dgdo_importance_priors"])
    assert run("algorithm=dgdo", file=lines).config.algorithm.importance_priors == expected


def test_two_spellings_that_agree_are_fine(run):
    assert run("agent.model_name_or_path=a", "actor_rollout_ref.model.path=a", "model=a").config.model.name == "a"


# --- sweeps and fingerprints -------------------------------------------------------------------------------------


def test_a_sweep_is_the_product_of_its_keys_with_the_keys_untouched(run):
    runs = expand_sweep(["mode=sync", "optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1"])
    assert runs == [
        ["mode=sync", "optimizer.lr=0.0001", "policy.kl_coef=0.01"],
        ["mode=sync", "optimizer.lr=0.0001", "policy.kl_coef=0.1"],
        ["mode=sync", "optimizer.lr=1e-05", "policy.kl_coef=0.01"],
        ["mode=sync", "optimizer.lr=1e-05", "policy.kl_coef=0.1"],
    ]
    configs = [run("algorithm=grpo", *words).config for words in runs]
    assert [(c.learner.lr, c.algorithm.kl_coef) for c in configs] == [
        (1e-4, 0.01),
        (1e-4, 0.1),
        (1e-5, 0.01),
        (1e-5, 0.1),
    ]


def test_ranges_and_lists_in_sweeps():
    assert expand_sweep(["seed=range(1,4)"]) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert expand_sweep(["trainer.logger=[console,wandb]"]) == [["trainer.logger=[console,wandb]"]]
    assert expand_sweep(["rollout.stop=[a],[b,c]"]) == [["rollout.stop=[a]"], ["rollout.stop=[b,c]"]]
    assert expand_sweep(["model='a b','c,d'"]) == [["model='a b'"], ["model='c,d'"]]
    assert expand_sweep([]) == [[]]


@pytest.mark.parametrize("word", ["learner.lr=interval(0,1)", "model=glob(*)"])
def test_a_sweep_without_given_values_is_refused(word):
    with pytest.raises(InputError, match="does not list the values"):
        expand_sweep([word])


def test_the_fingerprint_sees_what_changes_the_result(run):
    base = fingerprint(run().tree)
    assert len(base) == 64
    for same in ("resume=disable", "logging.to=[wandb]", "logging.output_dir=/tmp", "logging.verbosity=debug"):
        assert fingerprint(run(same).tree) == base
    for other in ("seed=1", "algorithm.beta=0.2", "logging.experiment=b", "data.options.n=2"):
        assert fingerprint(run(other).tree) != base
    assert fingerprint(dict(reversed(run().tree.items()))) == base


def test_runs_from_before_a_setting_existed_are_found(run):
    tree = run("algorithm=ppo").tree
    older = copy.deepcopy(tree)
    older["model"]["gradient_checkpointing"] = False
    for key, default in ADDED.items():
        *path, name = key.split(".")
        section = older
        for part in path:
            section = section[part]
        assert section.pop(name) == default
    assert fingerprint(older) == fingerprint(tree)


def test_a_teacher_changes_the_result_and_its_address_does_not(run):
    with_teacher = fingerprint(run("teacher=m", "teacher.url=http://one/v1").tree)
    assert with_teacher != fingerprint(run().tree)
    assert with_teacher == fingerprint(run("teacher=m", "teacher.url=http://two/v1").tree)


def test_the_fingerprint_leaves_the_tree_alone(run):
    tree = run().tree
    fingerprint(tree)
    assert tree == run().tree
