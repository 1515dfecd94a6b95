"""An algorithm with another loss has that loss's settings, and keeps nothing that was meant for the old one."""

from __future__ import annotations

import pytest
import yaml

from covey.errors import InputError

# What another loss makes of grpo, by the papers' own numbers.
LOSS_DEFAULTS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "seq-mean-token-mean"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "aggregation": "token-mean"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq-mean-token-mean"},
}


# --- the loss's own settings -------------------------------------------------------------------------------------


def test_another_loss_brings_its_own_settings(run):
    config = run("algorithm=gdpo", "algorithm.loss=gspo", "algorithm.clip_low=0.001").config
    assert (config.algorithm.name, config.algorithm.loss) == ("gdpo", "gspo")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.001, 4e-4)
    assert not hasattr(config.algorithm, "dual_clip")
    assert run("algorithm=rloo", "algorithm.loss=sapo", "algorithm.tau_neg=2").config.algorithm.tau_neg == 2.0


@pytest.mark.parametrize(
    ("words", "losses"),
    [
        (
            ["algorithm=rloo", "algorithm.clip_low=0.1"],
            "ppo_clip, dapo, dr_grpo, gspo, cispo, luspo, gmpo, dppo_tv, dppo_kl, clip_cov",
        ),
        (["algorithm=gdpo", "algorithm.loss=gspo", "algorithm.dual_clip=2"], "ppo_clip, dapo, dr_grpo"),
        (["algorithm=grpo", "algorithm.tau_pos=2"], "sapo"),
    ],
)
def test_a_setting_of_another_loss_names_the_losses_that_have_it(run, words, losses):
    with pytest.raises(InputError) as error:
        run(*words)
    key, first = words[-1].partition("=")[0], losses.partition(",")[0]
    assert str(error.value).startswith(
        f"{key} belongs to the loss {losses}: choose it with algorithm.loss={first}\n  all settings of"
    )


def test_a_loss_stays_with_the_algorithm_it_was_chosen_for(run):
    composed = run("algorithm=gvpo", file="algorithm: gdpo\nalgorithm.loss: gspo")
    assert composed.config.algorithm.loss == "gvpo"
    assert any("algorithm.loss was set for gdpo" in text for text in composed.warnings)


@pytest.mark.parametrize(
    ("algorithm", "loss", "warned"), [("grpo", "gspo", False), ("ppo", "gspo", False), ("gvpo", "gvpo", True)]
)
def test_verls_word_for_a_loss_goes_with_any_algorithm_that_has_it(run, algorithm, loss, warned):
    composed = run(f"algorithm={algorithm}", file="algorithm: gdpo\nactor.policy_loss.loss_mode: gspo")
    assert (composed.config.algorithm.name, composed.config.algorithm.loss) == (algorithm, loss)
    assert any("loss_mode has no effect with algorithm=gvpo" in text for text in composed.warnings) == warned


def test_verls_usual_loss_is_the_clipped_one_wherever_it_can_be(run):
    config = run("algorithm=rloo", file="actor.policy_loss.loss_mode: vanilla").config
    assert (config.algorithm.loss, config.algorithm.clip_low) == ("ppo_clip", 0.2)
    with pytest.raises(InputError, match="loss_mode=gspo does not go with algorithm=gvpo"):
        run("actor.policy_loss.loss_mode=gspo")


def test_a_loss_that_does_not_go_with_an_algorithm_is_refused_with_the_reason(run):
    with pytest.raises(InputError, match=r"algorithm\.loss=gspo does not go with algorithm=gvpo\n  its loss completes"):
        run("algorithm=gvpo", "algorithm.loss=gspo")
    with pytest.raises(InputError, match=r"algorithm\.loss=gvpo does not go with algorithm=grpo\n  its loss completes"):
        run("algorithm=grpo", "algorithm.loss=gvpo")
    with pytest.raises(InputError, match=r"algorithm.loss=gmpo does not go with algorithm=gvpo\n  its loss completes"):
        run("algorithm=gvpo+gmpo")
    with pytest.raises(InputError, match="unknown loss for grpo  gsp\n  did you mean   gspo"):
        run("algorithm=grpo", "algorithm.loss=gsp")


# --- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", LOSS_DEFAULTS)
@pytest.mark.parametrize("new", LOSS_DEFAULTS)
def test_another_loss_leaves_a_written_out_files_settings_of_the_old_one_behind(run, tmp_path, old, new):
    first = run("algorithm=grpo", f"algorithm.loss={old}", "algorithm.kl_coef=0.3", "algorithm.aggregation=token-mean")
    again = run(f"algorithm.loss={new}", file=yaml.safe_dump(first.tree, sort_keys=False))
    if old == new:
        assert (again.config, again.warnings) == (first.config, ())
        return
    section = again.tree["algorithm"]
    assert {key: section[key] for key in LOSS_DEFAULTS[new]} == LOSS_DEFAULTS[new]
    assert section["kl_coef"] == 0.3
    names = ", ".join(f"algorithm.{key}" for key in LOSS_DEFAULTS[old])
    assert again.warnings == (
        f"{tmp_path}/my.yaml: {names} were set for loss={old} and have no effect with loss={new}",
    )


def test_a_setting_stays_with_the_loss_that_its_layer_was_written_for(run, tmp_path):
    composed = run("algorithm.loss=gspo", file="algorithm: {name: grpo, clip_low: 0.1}")
    assert composed.config.algorithm.clip_low == 3e-4
    assert composed.warnings == (
        f"{tmp_path}/my.yaml, line 1: algorithm.clip_low was set for loss=ppo_clip and has no effect with loss=gspo",
    )
    both = run("algorithm.clip_high=0.002", file="algorithm: {name: grpo, loss: gspo, clip_low: 0.001}")
    assert (both.config.algorithm.clip_low, both.config.algorithm.clip_high) == (0.001, 0.002)
    assert both.warnings == ()


def test_a_file_may_set_what_only_the_command_lines_loss_has(run):
    composed = run("algorithm.loss=sapo", file="algorithm: {name: grpo, tau_pos: 2}")
    assert (composed.config.algorithm.tau_pos, composed.warnings) == (2.0, ())


def test_another_algorithm_leaves_all_settings_of_another_loss_behind_in_one_line(run, tmp_path):
    composed = run("algorithm=gspo", file="algorithm: {name: grpo, loss: sapo, tau_pos: 2}")
    assert (composed.config.algorithm.name, composed.config.algorithm.loss) == ("gspo", "gspo")
    assert composed.warnings == (
        f"{tmp_path}/my.yaml: algorithm.loss, algorithm.tau_pos were set for grpo and have no effect with "
        "algorithm=gspo",
    )


def test_an_algorithm_with_a_loss_is_one_choice(run):
    config = run("algorithm=reinforce+++gspo", "algorithm.clip_low=0.001").config
    assert (config.algorithm.name, config.algorithm.loss) == ("reinforce_plus_plus", "gspo")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.001, 4e-4)
    file = "defaults: [schema, override algorithm: grpo+sapo, _self_]\nalgorithm: {tau_pos: 2}"
    assert run(file=file).config.algorithm.tau_pos == 2.0
