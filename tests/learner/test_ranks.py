"""Several processes learn the same as one, with replicated (ddp), sharded (fsdp) and split (tensor parallel)
weights."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms.distill import Teacher
from covey.config.schema import CriticConfig, LearnerConfig
from covey.errors import InputError
from covey.learner.parallel import SINGLE_PROCESS, check_sharding, check_tensor_parallel
from covey.learner.saving import load_state
from covey.weights.collective import listen, open_store
from tests.learner.jobs import (
    Case,
    broken_update,
    from_settings,
    overflow,
    published,
    reference_course,
    resave,
    resume_moving,
    resume_training,
    sharded_parts,
    train,
    train_and_save,
    weights_in,
    weights_of,
)
from tests.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRanks]:
    ranks = LocalRanks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # as the ranks have; two would wait for each other while ranks work


def test_ranks_meet_at_one_address_of_a_machine() -> None:
    """127.0.0.2 is the same machine: a store that listened on all its addresses would answer there too."""
    door = listen("127.0.0.1")
    port = door.getsockname()[1]
    store = open_store("127.0.0.1", port, 1, door)
    open_store("127.0.0.1", port, 1, None).set("met", "yes")
    assert store.get("met") == b"yes"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


SLOW = pytest.mark.slow
FSDP_FIRST = [pytest.param("ddp", marks=SLOW), "fsdp"]
PLAIN: dict[str, Any] = {"algorithm": "grpo"}
COUPLED: dict[str, Any] = {"algorithm": "gvpo"}
WITH_REFERENCE: dict[str, Any] = {
    "algorithm": "grpo",
    "options": {"kl_coef": 0.5, "kl_estimator": "full"},
    "reference": True,
    "teacher": Teacher("full", 0.3),
}


def same_as_one_process(two: LocalRanks, case: Case, tolerance: float) -> None:
    expected, reported, scores = train(SINGLE_PROCESS, case)
    results = two.run(train, case)
    for weights, metrics, logprobs in results:
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        for step, numbers in enumerate(reported):
            assert metrics[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6, nan_ok=True)
        torch.testing.assert_close(logprobs, scores, atol=10 * tolerance, rtol=0)
    assert results[0][1] == results[1][1]  # all ranks report the same, bit for bit
    start = case.policy().state_dict()
    assert any(float((weight - start[name]).abs().max()) > 1e-3 for name, weight in expected.items())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [PLAIN, COUPLED, WITH_REFERENCE], ids=["grpo", "gvpo", "full-kl"])
def test_two_ranks_learn_what_one_process_does(two: LocalRanks, parallel: str, kind: dict[str, Any]) -> None:
    """Splits: one pass each; inside groups; one rank with two passes and one with one, which repeats a row."""
    for size in (None, 3, 4):
        same_as_one_process(two, Case(parallel=parallel, settings={"micro_batch_size": size}, **kind), 1e-6)


@pytest.mark.parametrize("parallel", FSDP_FIRST)
@pytest.mark.parametrize(
    "kind",
    [
        {"lora": 3, **WITH_REFERENCE},
        pytest.param({"lora": 3, "checkpointing": True}, marks=SLOW),
        {"model": {"tie_word_embeddings": True}, "checkpointing": True, "settings": {"micro_batch_tokens": 25}},
        # Each rank has a part of the only group. With the default eps, Adam amplifies rounding of gradients near 0.
        {"groups": 1, "settings": {"eps": 1e-4}, **COUPLED},
        {"family": "gemma3", "settings": {"eps": 1e-4}},
    ],
    ids=["lora", "lora-recomputed", "tied", "split", "with-vision-tower"],
)
def test_kinds_of_models(two: LocalRanks, parallel: str, kind: dict[str, Any]) -> None:
    same_as_one_process(two, Case(parallel=parallel, **kind), 1e-6)


def test_ranks_that_have_all_weights_keep_the_same_8_bit_moments(two: LocalRanks) -> None:
    pytest.importorskip("bitsandbytes")
    sizes, settings = {"hidden_size": 64, "intermediate_size": 128}, {"optimizer": "adamw8bit"}
    case = Case(parallel="ddp", dtype=torch.float32, model=sizes, settings=settings, **PLAIN)
    expected = train(SINGLE_PROCESS, case)[0]
    first, second = (weights for weights, _, _ in two.run(train, case))
    for name, weight in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=3e-3, rtol=0)  # a sum's last bit may change a code of 8


TENSOR_PARALLEL: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    "kind",
    [
        {**PLAIN, "model": {"attention_bias": True, "mlp_bias": True}},
        {**WITH_REFERENCE, "settings": {"micro_batch_size": 3}},
        {**COUPLED, "model": {"tie_word_embeddings": True}, "checkpointing": True},
        pytest.param({"algorithm": "ppo", "critic": CriticConfig(lr=1e-2, shared=True)}, marks=SLOW),
        pytest.param({"algorithm": "ppo", "critic": CriticConfig(lr=1e-2)}, marks=SLOW),
        {**PLAIN, "family": "qwen3", "settings": {"grad_clip": 0.01}},
        {**PLAIN, "family": "gemma3", "settings": {"eps": 1e-4}},
    ],
    ids=["biases", "full-kl", "tied", "shared-critic", "own-critic", "norms-of-heads", "with-vision-tower"],
)
def test_tensor_parallel_ranks_learn_what_one_process_does(two: LocalRanks, kind: dict[str, Any]) -> None:
    """Both ranks read all rows, and each has half of every layer's matrices. A query's norm sees half of the heads."""
    settings = kind.get("settings", {})
    same_as_one_process(two, Case(parallel="fsdp", **kind | {"settings": settings | TENSOR_PARALLEL}), 1e-6)


def test_the_language_model_beside_a_vision_tower_is_sharded_by_layers(two: LocalRanks) -> None:
    layers = [f"model.language_model.layers.{number}" for number in range(2)]
    for gathered, split in two.run(sharded_parts, Case(parallel="fsdp", family="gemma3", settings=TENSOR_PARALLEL)):
        assert gathered == layers
        assert {name.rpartition(".mlp.")[0] for name in split if ".mlp." in name} == set(layers)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=SLOW)])
def test_a_tensor_parallel_checkpoint_loads_in_one_process_and_back(
    two: LocalRanks, tmp_path: Path, dtype: torch.dtype
) -> None:
    split, shards, single = (Case(parallel="fsdp", dtype=dtype, settings=s) for s in (TENSOR_PARALLEL, {}, {}))
    folders = [tmp_path / name for name in ("split", "one", "split-again", "shards")]
    for folder in folders:
        folder.mkdir()
    counters = two.run(train_and_save, split, folders[0])[0]
    resave(SINGLE_PROCESS, single, folders[0], counters, folders[1])
    two.run(resave, split, folders[1], counters, folders[2])
    two.run(resave, shards, folders[2], counters, folders[3])
    contents = [load_state(folder, {}) | weights_in(folder) for folder in folders]
    for name, tensor in contents[0].items():
        assert all(torch.equal(tensor, other[name]) for other in contents), name
    assert all(content.keys() == contents[0].keys() for content in contents)


@SLOW
def test_two_tensor_parallel_groups_of_two(tmp_path: Path) -> None:
    four = LocalRanks(4, tmp_path)
    try:
        for kind in (
            PLAIN,
            COUPLED,
            {"family": "qwen3", "settings": {"micro_batch_size": 3}},
            {"settings": {"grad_clip": 0.01}},
        ):
            settings = kind.get("settings", {})
            same_as_one_process(four, Case(parallel="fsdp", **kind | {"settings": settings | TENSOR_PARALLEL}), 1e-6)
        (tmp_path / "four").mkdir()
        (tmp_path / "one").mkdir()
        case = Case(parallel="fsdp", dtype=torch.float64, settings=TENSOR_PARALLEL)
        counters = four.run(train_and_save, case, tmp_path / "four")[0]
        resave(SINGLE_PROCESS, case, tmp_path / "four", counters, tmp_path / "one")
        first, second = (load_state(tmp_path / name, {}) | weights_in(tmp_path / name) for name in ("four", "one"))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    finally:
        four.close()


def test_what_tensor_parallel_cannot_split() -> None:
    from transformers import GPT2Config, LlamaConfig

    with pytest.raises(InputError, match="does not divide the model's num_key_value_heads, 2"):
        check_tensor_parallel(LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4)
    with pytest.raises(InputError, match="transformers has no plan for it"):
        check_tensor_parallel(GPT2Config(), 2)
    with pytest.raises(InputError, match="remove it: learner"):
        check_sharding(LearnerConfig(tensor_parallel=2), adapter=True)
    with pytest.raises(InputError, match="ddp has them whole"):
        LearnerConfig(tensor_parallel=2, parallel="ddp")


@pytest.mark.parametrize("parallel", FSDP_FIRST)
def test_float32(two: LocalRanks, parallel: str) -> None:
    same_as_one_process(two, Case(parallel=parallel, dtype=torch.float32, settings={"eps": 1e-4}, **COUPLED), 1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        pytest.param({"dtype": torch.float64, "lora": 3}, marks=SLOW),
        pytest.param({"dtype": torch.bfloat16, "model": {"tie_word_embeddings": True}}, marks=SLOW),
    ],
    ids=["float64", "bfloat16", "lora", "bfloat16-tied"],
)
def test_a_checkpoint_is_for_any_number_of_ranks(two: LocalRanks, tmp_path: Path, kind: dict[str, Any]) -> None:
    """Written on two, read and written on one, read and written on two: bit for bit the same."""
    case = Case(parallel="fsdp", **kind)
    folders = [tmp_path / name for name in ("by-two", "by-one", "by-two-again")]
    for folder in folders:
        folder.mkdir()
    counters = two.run(train_and_save, case, folders[0])[0]
    resave(SINGLE_PROCESS, case, folders[0], counters, folders[1])
    two.run(resave, case, folders[1], counters, folders[2])
    assert [len(list(folder.glob("optimizer*"))) for folder in folders] == [2, 1, 2]
    contents = [load_state(folder, {}) | weights_in(folder) for folder in folders]
    for name, tensor in contents[0].items():
        assert all(torch.equal(tensor, other[name]) for other in contents), name
    assert contents[0].keys() == contents[1].keys() == contents[2].keys()
    assert counters["updates"] == 2


@pytest.mark.parametrize("lora", [pytest.param(0, marks=SLOW), 3])
def test_training_continues_on_other_ranks(two: LocalRanks, tmp_path: Path, lora: int) -> None:
    """Two steps here and two there are four steps."""
    sharded, single = Case(parallel="fsdp", lora=lora), Case(lora=lora)
    learner = single.learner(SINGLE_PROCESS)
    single.steps(learner, range(4))
    expected = weights_of(learner)
    folders = [tmp_path / "by-two", tmp_path / "by-one"]
    for folder in folders:
        folder.mkdir()
    from_two = resume_training(SINGLE_PROCESS, single, folders[0], two.run(train_and_save, sharded, folders[0])[0])
    from_one = two.run(resume_training, sharded, folders[1], train_and_save(SINGLE_PROCESS, single, folders[1]))[0]
    for name, weight in expected.items():
        torch.testing.assert_close(from_two[name], weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(from_one[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("parallel", FSDP_FIRST)
@pytest.mark.parametrize("lora", [0, pytest.param(3, marks=SLOW)], ids=["full", "lora"])
def test_a_moving_reference_on_two_ranks(two: LocalRanks, tmp_path: Path, parallel: str, lora: int) -> None:
    """It moves as in one process, and its checkpoint continues on another number of ranks."""
    shared, single = Case(parallel=parallel, reference=True, lora=lora), Case(reference=True, lora=lora)
    folders = [tmp_path / name for name in ("unused", "by-two", "by-one")]
    for folder in folders:
        folder.mkdir()
    whole = reference_course(SINGLE_PROCESS, single, range(6), folders[0], 9)
    begun = two.run(reference_course, shared, range(3), folders[1], 3)[0]
    reference_course(SINGLE_PROCESS, single, range(3), folders[2], 3)
    on_one = resume_moving(SINGLE_PROCESS, single, range(3, 6), folders[1])
    on_two = two.run(resume_moving, shared, range(3, 6), folders[2])[0]
    assert not torch.allclose(whole[3], whole[5], atol=1e-4)
    for found, expected in zip([*begun, *on_one, *on_two], [*whole, *whole[3:]], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_half_precision_has_the_same_masters_in_both_ways(two: LocalRanks, tmp_path: Path) -> None:
    found = []
    for parallel in ("ddp", "fsdp"):
        (folder := tmp_path / parallel).mkdir()
        two.run(train_and_save, Case(parallel=parallel, dtype=torch.bfloat16, settings={"eps": 1e-3}), folder)
        found.append(load_state(folder, {}))
        assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert found[0].keys() == found[1].keys() and any(name.startswith("master/") for name in found[0])
    for name, tensor in found[0].items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("parallel", FSDP_FIRST)
def test_a_broken_row_of_one_rank_stops_the_update_of_all(two: LocalRanks, parallel: str) -> None:
    for before, after, skipped in two.run(broken_update, Case(parallel=parallel)):
        assert skipped == 1
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("parallel", FSDP_FIRST)
def test_an_overflow_of_one_rank_halves_the_scale_of_all(two: LocalRanks, parallel: str) -> None:
    """Float16: the scale begins at 65536 and is halved when a gradient overflows."""
    assert two.run(overflow, Case(parallel=parallel, dtype=torch.float16)) == [(32768.0, False)] * 2


@pytest.mark.parametrize("parallel", FSDP_FIRST)
@pytest.mark.parametrize(
    "critic",
    [pytest.param(CriticConfig(lr=1e-2), marks=SLOW), CriticConfig(lr=1e-2, shared=True)],
    ids=["own", "shared"],
)
def test_a_critic(two: LocalRanks, parallel: str, critic: CriticConfig) -> None:
    same_as_one_process(two, Case("ppo", parallel=parallel, critic=critic, settings={"grad_clip": 0.05}), 1e-6)


@pytest.mark.parametrize(
    "kind",
    [pytest.param({"dtype": torch.bfloat16}, marks=SLOW), {"dtype": torch.float32, "lora": 3}],
    ids=["bfloat16", "lora"],
)
def test_an_engine_receives_full_weights(two: LocalRanks, kind: dict[str, Any]) -> None:
    """As of one process: names, precision, adapters merged. The rounding of bfloat16 may differ by its last bit."""
    expected = published(SINGLE_PROCESS, Case(settings={"eps": 1e-3}, **kind))
    for found in two.run(published, Case(parallel="fsdp", settings={"eps": 1e-3}, **kind)):
        assert list(found) == list(expected)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-3, rtol=1 / 128)


@SLOW
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_settings_make_a_learner_of_every_rank(
    two: LocalRanks, parallel: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Policy and reference as a command line builds them; transformers can load the folder that is saved."""
    from transformers import AutoModelForCausalLM

    settings = [f"model={tiny_model_folder}", "model.device=cpu", "data=arithmetic", "learner.lr=0.01"]
    settings = [*settings, "algorithm=grpo", "algorithm.kl_coef=0.1", "learner.eps=1e-4"]
    expected = from_settings(SINGLE_PROCESS, settings, None)
    for found in two.run(from_settings, [*settings, f"learner.parallel={parallel}"], tmp_path):
        assert found["sharded"] == (parallel == "fsdp")
        torch.testing.assert_close(found["ref_logprobs"], expected["ref_logprobs"], atol=1e-5, rtol=0)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, atol=1e-5, rtol=0)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.allclose(saved[name], weight, atol=1e-5) for name, weight in expected["weights"].items())


@pytest.mark.parametrize(
    ("settings", "adapter", "message"),
    [
        ({"offload_weights": True}, False, "offload_weights moves"),
        ({"offload_optimizer": True}, True, "cannot be merged"),
    ],
)
def test_what_cannot_be_sharded(settings: dict[str, Any], adapter: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_sharding(LearnerConfig(parallel="fsdp", **settings), adapter=adapter)


@SLOW
def test_more_ranks_than_fit(tmp_path: Path) -> None:
    """Three ranks: 64 rows of a matrix are 22, 22 and 20; 1 group of 4 rows; adapters with 2 rows and 3 ranks."""
    three = LocalRanks(3, tmp_path)
    try:
        for kind in (PLAIN, COUPLED, WITH_REFERENCE, {"lora": 2}, {"groups": 1, "settings": {"micro_batch_size": 1}}):
            for parallel in ("ddp", "fsdp"):
                same_as_one_process(three, Case(parallel=parallel, **kind), 1e-6)
        for name in ("three", "one"):
            (tmp_path / name).mkdir()
        case = Case(parallel="fsdp", lora=2)
        resave(
            SINGLE_PROCESS,
            case,
            tmp_path / "three",
            three.run(train_and_save, case, tmp_path / "three")[0],
            tmp_path / "one",
        )
        first, second = (load_state(tmp_path / name, {}) | weights_in(tmp_path / name) for name in ("three", "one"))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    finally:
        three.close()
