"""How many devices other vocabularies ask for, and what that makes of the cluster."""

from __future__ import annotations

import pytest

from covey.app.cluster import resolve_cluster
from covey.config.schema import ClusterConfig, Config, RolloutConfig
from covey.errors import InputError


def cluster(composed):
    found = composed.config.cluster
    return found.name, found.nodes, found.learner_devices, found.rollout_devices


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.n_gpus_per_node=8", ("ray", 1, 8, None)),
        ("trainer.n_gpus_per_node=8 trainer.nnodes=2", ("ray", 2, 16, None)),
        ("trainer.nnodes=2", ("ray", 2, 1, None)),
        ("train_model.num_devices=2", ("ray", 1, 2, None)),
        ("inference_model.num_devices=2", ("ray", 1, 1, 2)),
        ("train_model.num_devices=2 inference_model.num_devices=1", ("ray", 1, 2, 1)),
        ("train_model.num_devices=1 inference_model.num_devices=1", ("local", 1, 1, None)),
        ("trainer.n_gpus_per_node=1 trainer.nnodes=1", ("local", 1, 1, None)),
        ("cluster=ray trainer.n_gpus_per_node=1", ("ray", 1, 1, None)),
    ],
)
def test_devices_of_other_vocabularies(run, words, expected):
    assert cluster(run(*words.split())) == expected


def test_one_process_cannot_have_two_devices(run):
    for words in (["cluster=local", "train_model.num_devices=2"], ["cluster.learner_devices=2"]):
        with pytest.raises(InputError, match="cluster=local is one process on one device"):
            run(*words)


def test_the_reference_has_no_devices_of_its_own(run):
    composed = run("ref_model.num_devices=2")
    assert cluster(composed) == ("local", 1, 1, None)
    assert [text for text in composed.warnings if "ref_model.num_devices" in text and "learners' devices" in text]
    assert not run("ref_model.num_devices=1").warnings


def test_engines_on_the_learners_gpus_are_one_to_each() -> None:
    config = Config(cluster=ClusterConfig(name="ray"), rollout=RolloutConfig(tensor_parallel=2))
    resolved, said = resolve_cluster(config)
    assert resolved.rollout.tensor_parallel == 1 and "has no effect" in said[0]
    apart = Config(cluster=ClusterConfig(name="ray", rollout_devices=4), rollout=RolloutConfig(tensor_parallel=2))
    assert resolve_cluster(apart) == (apart, [])
