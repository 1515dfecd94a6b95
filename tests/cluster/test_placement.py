"""Placement on small clusters, counted by hand."""

from __future__ import annotations

import pytest

from covey.cluster.placement import Bundle, Node, Slot, choose_transport, place
from covey.config.schema import ClusterConfig
from covey.errors import Absent, InputError

BIG = Node("10.0.0.1", cpus=32, gpus=4)
SMALL = Node("10.0.0.2", cpus=32, gpus=2)


def ray(**given) -> ClusterConfig:
    return ClusterConfig(name="ray", **given)


def test_an_engine_shares_its_learners_device_by_default() -> None:
    plan = place(ray(learner_devices=2), [BIG], gpu=True)
    assert plan.bundles == (Bundle("10.0.0.1"), Bundle("10.0.0.1"))
    assert plan.learners == (Slot(0, 0, 0.5), Slot(1, 1, 0.5))
    assert plan.engines == (Slot(0, 0, 0.5), Slot(1, 1, 0.5))
    assert plan.colocated


def test_engines_with_devices_of_their_own_share_none() -> None:
    plan = place(ray(learner_devices=2, rollout_devices=3), [SMALL, BIG], gpu=True)
    taken = [slot.bundle for slot in (*plan.learners, *plan.engines)]
    assert sorted(taken) == [0, 1, 2, 3, 4] and not plan.colocated
    assert {slot.share for slot in (*plan.learners, *plan.engines)} == {1.0}
    assert [plan.node(slot) for slot in (*plan.learners, *plan.engines)] == ["10.0.0.1"] * 4 + ["10.0.0.2"]
    assert plan.nodes == ("10.0.0.1", "10.0.0.2")


def test_an_engine_over_two_gpus_has_both_on_one_machine() -> None:
    """Three of the larger machine's four GPUs are learners': two for an engine are left on the smaller one only."""
    plan = place(ray(learner_devices=3, rollout_devices=2), [BIG, SMALL], gpu=True, tensor_parallel=2)
    assert [plan.bundles[slot.bundle] for slot in plan.engines] == [Bundle("10.0.0.2", devices=2)]


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "words"),
    [
        (ray(learner_devices=7), 1, ["requested   7 GPUs for learners", "10.0.0.1: 32 CPUs, 4 GPUs"]),
        (ray(learner_devices=4, rollout_devices=3), 1, ["3 GPUs for engines", "10.0.0.2: 32 CPUs, 2 GPUs"]),
        (ray(learner_devices=3, rollout_devices=4), 2, ["2 of one machine for each"]),  # 1 + 2 are left
        (ray(nodes=3), 1, ["cluster.nodes=3, but the cluster has 2 machines"]),
    ],
)
def test_a_shortage_names_what_was_requested_and_what_is_available(config, tensor_parallel, words) -> None:
    with pytest.raises(Absent) as error:
        place(config, [BIG, SMALL], gpu=True, tensor_parallel=tensor_parallel)
    for text in (*words, "requested", "available"):
        assert text in str(error.value)


def test_shares_of_an_engine_that_do_not_add_up() -> None:
    with pytest.raises(InputError, match=r"not a multiple of rollout.tensor_parallel=2"):
        place(ray(rollout_devices=3), [BIG], gpu=True, tensor_parallel=2)
    with pytest.raises(InputError, match=r"cluster.rollout_devices=2 or a multiple"):
        place(ray(learner_devices=2), [BIG], gpu=True, tensor_parallel=2)


def test_on_cpus_a_role_takes_a_core() -> None:
    three = Node("127.0.0.1", cpus=3)
    assert len(place(ray(rollout_devices=2), [three], gpu=False).bundles) == 3
    with pytest.raises(Absent, match="3 CPUs, 0 GPUs"):
        place(ray(rollout_devices=3), [three], gpu=False)
    with pytest.raises(Absent):
        place(ray(), [three], gpu=True)


def test_on_a_machine_of_our_own_processes_share_cores_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.cluster import start

    monkeypatch.setattr(start, "this_machine", lambda: Node("127.0.0.1", cpus=2))
    two = start.own_machine()
    full = place(ray(learner_devices=2), [two], gpu=False)
    assert not full.crowded  # an engine works while its learner waits
    assert full.describe() == (
        "2 learners, 2 engines, which alternate with the learners; 2 processes at a time on 2 cores; "
        "1 machine: 127.0.0.1"
    )
    shared = place(ray(rollout_devices=2), [two], gpu=False)
    assert shared.crowded and "1 learner, 2 engines; 3 processes at a time on 2 cores" in shared.describe()
    with pytest.raises(Absent) as error:
        place(ray(learner_devices=64), [two], gpu=False)
    for text in ("64 CPUs for learners", "127.0.0.1: 2 CPUs", "2 processes at a time on a core", "lower cluster.learn"):
        assert text in str(error.value)
    monkeypatch.setattr(start, "this_machine", lambda: BIG)  # a GPU has a core of its own
    assert start.own_machine() == BIG


def test_processes_that_share_cores_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.app.cluster import resolve_cluster
    from covey.cluster import start
    from covey.config.schema import Config

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(start, "this_machine", lambda: Node("127.0.0.1", cpus=2))
    assert resolve_cluster(Config(cluster=ray(rollout_devices=1)))[1] == []
    (warning,) = resolve_cluster(Config(cluster=ray(learner_devices=2, rollout_devices=2)))[1]
    assert warning.startswith("4 processes share 2 cores: cluster.learner_devices=2 and cluster.rollout_devices=2\n")


def test_threads_are_shared_out_among_the_processes_of_a_machine() -> None:
    plan = place(ray(learner_devices=6), [BIG, SMALL], gpu=True)
    assert plan.busiest(plan.learners) == 4


def test_the_transport_and_why() -> None:
    one = place(ray(rollout_devices=1), [BIG], gpu=True)
    two = place(ray(learner_devices=4, rollout_devices=2), [BIG, SMALL], gpu=True)
    shared = place(ray(learner_devices=6), [BIG, SMALL], gpu=True)
    assert choose_transport("auto", None)[0] == "in_process"
    assert choose_transport("auto", one) == ("shared_memory", "all on one machine")
    assert choose_transport("auto", two) == ("collective", "2 machines: broadcast by NCCL")
    assert choose_transport("auto", shared)[0] == "file"
    assert choose_transport("file", one) == ("file", "as set")
    with pytest.raises(InputError, match=r"on 2 machines: 10.0.0.1, 10.0.0.2"):
        choose_transport("shared_memory", two)
    with pytest.raises(InputError, match="one member per GPU"):
        choose_transport("collective", shared)
