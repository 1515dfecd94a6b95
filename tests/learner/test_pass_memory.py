"""The predicted memory of a pass against the bytes that torch's dispatcher counts, and the plans made from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from covey.algorithms import algorithm_schemas, make
from covey.app import models
from covey.app.cluster import ActorSpec
from covey.app.models import LongestRow
from covey.app.prepare import make_algorithm
from covey.config import compose
from covey.config.schema import CriticConfig, LearnerConfig
from covey.errors import InputError
from covey.learner import pass_memory
from covey.learner.learner import Learner
from covey.learner.parallel import SINGLE_PROCESS
from covey.learner.pass_memory import CPU_TOKENS, MOST_TOKENS, Demand, PassMemory, PassShapes, largest
from covey.memory import GIB
from covey.models.loading import Reference, open_source, parameter_count, set_checkpointing
from covey.protocols import Needs
from covey.types import Samples
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.learner.live_bytes import measure

peft = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}
QWEN_1_5B = {
    **{"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "one head per key": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=4096)),
    "1.5B": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN_1_5B)),
}
CASES = [
    ("llama", torch.float32, "cpu", 8, [120] * 4),
    ("llama", torch.float32, "cpu", 8, [700]),  # a long answer: its mask counts
    ("llama", torch.float32, "cpu", 300, [100] * 7),  # a long prompt, whose keys are copied for each answer
    ("one head per key", torch.float32, "cpu", 8, [120] * 4),
    ("qwen3", torch.float32, "cpu", 8, [120] * 4),
    ("gemma3", torch.float32, "cpu", 8, [120] * 4),
    ("llama", torch.bfloat16, "cpu", 8, [120] * 4),
    ("qwen3", torch.bfloat16, "meta", 8, [120] * 4),  # flash attention
    ("1.5B", torch.bfloat16, "meta", 256, [16_384]),
]


def model_of(name: str, dtype: torch.dtype, device: str, *, lora: bool, checkpointing: bool) -> Any:
    with torch.device(device):
        model = MODELS[name]().to(dtype).eval()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    set_checkpointing(model, checkpointing)
    return model


def memory_of(shapes: PassShapes, total: float = 80 * GIB, *, gpu: bool = True, **demand: Any) -> PassMemory:
    return PassMemory((shapes,), Demand(**demand), total=total, states=0.0, gpu=gpu)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}")
def test_prediction_against_measurement(case: Any, lora: bool, checkpointing: bool) -> None:
    """What a forward pass leaves within −2 and +40 % (the bound on masks is loose), the peak within −4 and +30 %."""
    name, dtype, device, prompt, answers = case
    model = model_of(name, dtype, device, lora=lora, checkpointing=checkpointing)
    shapes = PassShapes.of(model, Demand(prompt, max(answers)), gpu=False)
    if device == "meta":
        shapes = replace(shapes, flash=True)
    longest, rows = prompt + max(answers), 64
    found = measure(model, prompt, answers, chunk=rows)
    held = shapes.held(found.tokens, longest, checkpointing=checkpointing)
    peak = memory_of(shapes).peak(found.tokens, longest, checkpointing=checkpointing, logit_rows=rows)
    assert 0.98 <= held / found.held <= 1.4, f"{held:.0f}, measured {found.held}"
    assert 0.96 <= peak / found.peak <= 1.3, f"{peak:.0f}, measured {found.peak}"


@pytest.mark.parametrize("compared", [["full_kl"], ["teacher_kl"], ["full_kl", "teacher_kl"], ["teacher_top"]])
def test_a_kl_over_the_vocabulary_needs_more_for_each_logit(compared: list[str]) -> None:
    """Most of this pass is logits: in float32, and in bfloat16, whose copies are float32."""
    answers = [100] * 4
    for dtype in (torch.float32, torch.bfloat16):
        policy, other = (LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 8000})).to(dtype) for _ in range(2))
        found = measure(
            policy,
            8,
            answers,
            chunk=256,
            reference=other if "full_kl" in compared else None,
            teacher=other if "teacher_kl" in compared else None,
            top=4 * ("teacher_top" in compared),
        )
        demand = Demand(8, 100, **dict.fromkeys(compared, True))
        memory = memory_of(PassShapes.of(policy, demand, gpu=False))
        peak = memory.peak(found.tokens, 108, checkpointing=False, logit_rows=256)
        assert 0.98 <= peak / found.peak <= 1.3, f"{peak:.0f}, measured {found.peak}"
    gpu = PassShapes.of(policy, demand, gpu=True)
    assert gpu.logit_bytes == memory.shapes[0].logit_bytes  # the kernels compute no KL
    assert gpu.logit_rows == memory.shapes[0].logit_rows


QWEN = PassShapes(
    **{"layers": 28, "hidden": 1536, "queries": 1536, "keys": 256, "heads": 12, "inner": 8960, "vocabulary": 151_936},
    **{"itemsize": 2, "flash": True, "logit_bytes": 2, "logit_rows": 1684},
)


def test_the_bytes_of_a_layer_by_hand() -> None:
    """Qwen2.5-1.5B in bfloat16 with flash attention, all weights trained."""
    norms = 2 * 1536 * (4 + 2)
    inputs = 2 * (1536 + 1536 + 8960)
    attention = 2 * (2 * 1536 + 2 * 256) + 4 * 12
    assert QWEN.layer_bytes(4096) == norms + inputs + attention + 2 * 3 * 8960
    assert replace(QWEN, scale=0.5).layer_bytes(4096) == QWEN.layer_bytes(4096) / 2


@given(
    tokens=st.integers(1, 50_000),
    more=st.integers(0, 10_000),
    longest=st.integers(1, 50_000),
    checkpointing=st.booleans(),
    flash=st.booleans(),
)
def test_the_prediction_grows_with_tokens_and_rows(
    tokens: int, more: int, longest: int, checkpointing: bool, flash: bool
) -> None:
    memory = memory_of(replace(QWEN, flash=flash, quadratic=not flash))
    found = [
        memory.peak(count, row, checkpointing=checkpointing, logit_rows=1000)
        for count, row in ((tokens, longest), (tokens + more, longest), (tokens + more, longest + more))
    ]
    assert found == sorted(found)
    kept = memory.peak(tokens, longest, checkpointing=False, logit_rows=1000)
    assert (
        memory.peak(tokens, longest, checkpointing=True, logit_rows=1000) <= kept + QWEN.layer_bytes(longest) * tokens
    )


@pytest.mark.parametrize(
    ("total", "answer", "checkpointing", "rows"),
    [(80, 16_000, False, 1684), (50, 16_000, True, 1684), (10, 16_000, True, 1684), (2.08, 1664, True, 210)],
)
def test_the_fastest_plan_that_holds_the_longest_row(total: float, answer: int, checkpointing: bool, rows: int) -> None:
    memory = memory_of(QWEN, total * GIB, prompt=384, answer=answer)
    plan = memory.plan(memory.demand.longest)
    assert (plan.fits, plan.checkpointing, plan.logit_rows) == (True, checkpointing, rows)
    longest = 384 + answer
    assert memory.peak(longest, longest, checkpointing=checkpointing, logit_rows=rows) <= memory.available
    assert 256 <= plan.tokens <= MOST_TOKENS


def test_a_pass_takes_as_many_tokens_as_fit() -> None:
    memory = memory_of(QWEN, 20 * GIB, answer=512)
    plan = memory.plan(512)
    assert not plan.checkpointing and 512 < plan.tokens < MOST_TOKENS
    peaks = [memory.peak(n, 512, checkpointing=False, logit_rows=1684) for n in (plan.tokens, plan.tokens + 1)]
    assert peaks[0] <= memory.available < peaks[1]


def test_settings_win() -> None:
    on = memory_of(QWEN, answer=512, checkpointing=True)
    assert on.plan(512).checkpointing and on.plan(512).tokens == MOST_TOKENS
    off = memory_of(QWEN, 60 * GIB, answer=16_384, checkpointing=False)
    assert not off.plan(16_384).checkpointing
    tokens = replace(memory_of(QWEN, 60 * GIB, answer=512), tokens=30_000)
    assert (tokens.plan(512).tokens, tokens.plan(512).checkpointing) == (30_000, True)


@pytest.mark.parametrize(("gib", "tokens"), [(24, 8192), (16, 4096), (8, 2048), (4, 1024)])
def test_on_a_cpu_tokens_are_halved_until_they_fit(gib: int, tokens: int) -> None:
    smollm2 = PassShapes(
        **{"layers": 30, "hidden": 576, "queries": 576, "keys": 192, "heads": 9, "inner": 1536, "vocabulary": 49_152},
        **{"itemsize": 4, "logit_rows": 1302},
    )
    assert memory_of(smollm2, gib * GIB, gpu=False).plan(0).tokens == tokens
    assert CPU_TOKENS == 8192


def test_a_measured_pass_corrects_the_layers() -> None:
    memory = memory_of(QWEN, 50 * GIB, answer=16_384)
    assert memory.undecided and memory.probe_tokens == 1024
    assert memory.plan(16_384).checkpointing
    measured = 0.6 * QWEN.held(1024, 1024, checkpointing=False)
    corrected = memory.corrected(measured, 1024)
    assert not corrected.plan(16_384).checkpointing
    assert not memory_of(QWEN, answer=512).undecided  # everything fits: nothing is measured
    assert memory_of(QWEN, 1 * GIB, answer=512).probe_tokens == 0  # not even a small pass fits


def test_the_engine_s_cache_is_left_free() -> None:
    demand = Demand(answer=512, cache_share=0.5, cache_bytes=10 * GIB)
    memory = PassMemory((QWEN,), demand, total=80 * GIB, states=20 * GIB, gpu=True)
    assert memory.taken == 30 * GIB and memory.available == pytest.approx(0.85 * 50 * GIB)
    large = replace(memory, demand=replace(demand, cache_bytes=100 * GIB))
    assert large.taken == 20 * GIB + 0.5 * 60 * GIB
    vllm = replace(memory, demand=Demand(engine_share=0.4))
    assert vllm.taken == 20 * GIB + 0.4 * 80 * GIB


def test_what_was_chosen_in_one_line() -> None:
    memory = replace(memory_of(QWEN, prompt=384, answer=16_000), states=40 * GIB)
    assert memory.note() == (
        "answers of up to 16,000 tokens: activations checkpointed, logits in chunks of 1,684 tokens, passes of "
        f"{MOST_TOKENS:,} tokens; {40 + memory.plan(16_384).peak / GIB:.1f} GiB of 80 predicted"
    )


def test_a_run_that_cannot_fit_is_refused_with_the_setting_to_change() -> None:
    memory = memory_of(QWEN, 10 * GIB, prompt=384, answer=100_000, refuse=True, cache_share=0.5, cache_bytes=GIB)
    with pytest.raises(InputError, match=r"answers of up to 100,000 tokens do not fit into memory") as error:
        memory.check()
    lower = int(str(error.value).split("lower rollout.max_tokens to ")[1].split(";")[0].split(" ")[0].replace(",", ""))
    assert memory.plan(384 + lower).fits and not memory.plan(384 + lower + 1).fits
    assert "rollout.max_sequences" in str(error.value)
    replace(memory, demand=replace(memory.demand, answer=lower)).check()
    replace(memory, tokens=1024).check()  # a set size of passes is tried


def test_the_largest_number_that_fits() -> None:
    assert [largest(lambda n, most=most: n <= most, 100) for most in (0, 1, 57, 100, 500)] == [1, 1, 57, 100, 100]


def test_a_model_larger_than_the_gpu_is_refused_before_it_is_loaded() -> None:
    """7.6 billion weights in bfloat16: 2 + 4 + 12 bytes each, and 2 of the reference; 80 GiB are 85.9 GB."""
    size: dict[str, Any] = {"weights": 7_600_000_000, "copies": 2, "itemsize": 2, "memory": 80 * GIB}
    with pytest.raises(InputError, match="142 GiB of weights, gradients and optimiser states") as error:
        pass_memory.check_states(LearnerConfig(), trained=7_600_000_000, **size)
    assert "model.lora.rank=16" in str(error.value)
    with pytest.raises(InputError, match="99 GiB"):
        pass_memory.check_states(LearnerConfig(optimizer="adamw8bit"), trained=7_600_000_000, **size)
    pass_memory.check_states(LearnerConfig(offload_optimizer=True), trained=7_600_000_000, **size)
    pass_memory.check_states(LearnerConfig(), trained=40_000_000, **size | {"copies": 1})


# -- In the learner ----------------------------------------------------------------------------------------------------


def planned(model: Any, monkeypatch: pytest.MonkeyPatch, memory: float, **demand: Any) -> Learner:
    monkeypatch.setattr(pass_memory, "machine_memory", lambda: memory)
    learner = Learner(model, LearnerConfig(lr=1e-3), total_updates=1)
    learner.plan_memory(Demand(**demand))
    return learner


def test_checkpointing_is_chosen_for_a_row_that_needs_it_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three memories: the updates are the same, bit by bit, although some keep activations and some recompute them."""
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    weights, chosen = [], []
    for memory in (1e9, 3.2e6, 2.4e6):
        model = tiny_llama()
        learner = planned(model, monkeypatch, memory, answer=256)
        learner.update(batch, make("grpo"))
        chosen.append(model.is_gradient_checkpointing)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (chosen[0], chosen[-1]) == (False, True)
    assert all(torch.equal(weights[0], other) for other in weights[1:])


def test_a_longer_row_than_expected_turns_checkpointing_on_while_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(max_position_embeddings=8192)
    learner = planned(model, monkeypatch, 7.2e6, answer=16)
    assert not model.is_gradient_checkpointing
    long = rows_of(1, 1)[0]
    count = 600
    long = replace(
        long, response_ids=(5,) * count, mask=(True,) * count, logprobs=(-3.0,) * count, versions=(0,) * count
    )
    learner.update(batch_of([long, long], 2, dtype=torch.float32), make("grpo"))
    assert model.is_gradient_checkpointing
    learner.update(batch_of(rows_of(1, 2), 2, dtype=torch.float32), make("grpo"))
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("rank", [0, 2])
def test_memory_is_planned_with_the_policy_as_it_trains(rank: int) -> None:
    """Also if the reference is scored first, without gradient and with the adapter disabled."""
    model = tiny_llama()
    if rank:
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    learner = Learner(model, LearnerConfig(), total_updates=1, reference=Reference.of(model))
    rows = rows_of(2, 4)
    batch = batch_of(rows, 4, dtype=torch.float32)
    samples = Samples(
        rows=tuple(rows),
        group_N=batch.group_N,
        rewards={"r": batch.rewards_N.double()},
        weights={"r": 1.0},
        longest_N=batch.length_N,
        truncated_N=torch.zeros(len(rows), dtype=torch.bool),
        episode_R=batch.episode_R,
        mask_RT=batch.mask_RT,
        old_logprobs_RT=batch.old_logprobs_RT,
    )
    assert learner.annotate(samples, Needs(reference=True)).ref_logprobs_RT is not None
    assert learner._memory is not None
    assert (learner._memory.shapes[0].trained, learner._memory.shapes[0].inputs) == (not rank, True)


def test_a_critic_s_backbone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(
        tiny_llama(), LearnerConfig(), total_updates=1, critic=CriticConfig(), critic_backbone=tiny_llama(seed=1)
    )
    learner.plan_memory(Demand(answer=16))
    assert learner._memory is not None
    policy, critic = learner._memory.shapes
    assert (critic.vocabulary, critic.layer_bytes(1)) == (0, policy.layer_bytes(1))


def test_states_are_counted_before_and_after_they_exist() -> None:
    """float32: weights, gradients and two moments; bfloat16: weights, masters, their gradients and moments."""
    cpu = torch.device("cpu")
    for dtype, each in ((torch.float32, 16), (torch.bfloat16, 18)):
        model = tiny_llama(dtype=dtype)
        learner = Learner(model, LearnerConfig(), total_updates=1)
        count, optimizer = sum(p.numel() for p in model.parameters()), learner.optimizer
        assert pass_memory.device_memory(cpu, [model], [optimizer])[1] == each * count
        assert optimizer.pending_bytes() == 12 * count
        learner.update(batch_of(rows_of(1, 2), 2, dtype=torch.float32), make("grpo"))
        assert pass_memory.device_memory(cpu, [model], [optimizer])[1] == each * count
        assert optimizer.pending_bytes() == (4 * count if dtype == torch.float32 else 0)


@pytest.mark.parametrize(
    ("demand", "same", "loaded"),
    [
        (Demand(answer=64), False, 0),
        (Demand(answer=64, full_kl=True), False, 1),
        (Demand(answer=64, full_kl=True, teacher_kl=True), False, 2),
        (Demand(answer=64, full_kl=True, teacher_kl=True), True, 1),
    ],
)
def test_offloaded_models_that_updates_load_are_planned(
    monkeypatch: pytest.MonkeyPatch, demand: Demand, same: bool, loaded: int
) -> None:
    """On a GPU, whose free memory does not show them."""
    reference, teacher = Reference(tiny_llama()), Reference(tiny_llama())
    reference.offload = teacher.offload = True
    options: dict[str, Any] = {"reference": reference, "teacher": reference if same else teacher}
    learner = Learner(tiny_llama(), LearnerConfig(micro_batch_tokens=64), total_updates=1, **options)
    monkeypatch.setattr(Learner, "device", torch.device("cuda"))
    monkeypatch.setattr("covey.learner.learner.device_memory", lambda *_: (80 * GIB, GIB))
    monkeypatch.setattr(PassMemory, "undecided", False)
    learner.plan_memory(demand)
    assert learner._memory is not None
    assert learner._memory.states - GIB == loaded * sum(p.nbytes for p in reference.model.parameters())


@pytest.mark.parametrize(
    ("words", "copies", "teachers"),
    [
        ([], 1, 0),
        (["algorithm.kl_coef=0.1"], 2, 0),
        (["algorithm.kl_coef=0.1", "learner.offload_reference=true"], 1, 0),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=full", "learner.offload_reference=true"], 2, 0),
        (["teacher.name=MODEL"], 1, 1),
        (["teacher.name=MODEL", "learner.offload_reference=true"], 1, 0),
        (["teacher.name=MODEL", "learner.offload_reference=true", "teacher.kl=full"], 1, 1),
        (["teacher.name=initial"], 2, 0),
        (["teacher.name=current"], 1, 0),
        (["teacher.name=MODEL", "teacher.url=http://host/v1"], 1, 0),
    ],
)
def test_a_reference_and_a_teacher_count_before_they_are_loaded(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], copies: int, teachers: int
) -> None:
    found: dict[str, Any] = {}
    words = [word.replace("MODEL", str(tiny_model_folder)) for word in words]
    composed = compose([f"model={tiny_model_folder}", "algorithm=grpo", *words], algorithms=algorithm_schemas())
    source, algorithm = open_source(composed.config.model), make_algorithm(composed.config)
    spec = ActorSpec(composed.config, algorithm, source, 1, 1, LongestRow(8, 8))
    memory = Mock(total_memory=80 * GIB)
    monkeypatch.setattr("covey.models.loading.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(pass_memory, "check_states", lambda config, **sizes: found.update(sizes))
    models._check_states(spec, composed.config.model, composed.config.learner, SINGLE_PROCESS)
    assert (found["copies"], found["teacher"]) == (copies, teachers * 2 * parameter_count(source))


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        (["algorithm.kl_coef=0.1"], 0),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=full"], 3),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=full", "algorithm.kl_in=reward"], 3),
        (["teacher.name=current", "teacher.kl=full"], 3),
        (["teacher.name=MODEL", "teacher.url=http://host/v1", "teacher.kl=top_k"], 2),
    ],
)
def test_a_run_s_kl_is_planned(tiny_model_folder: Path, words: list[str], copies: int) -> None:
    words = [word.replace("MODEL", str(tiny_model_folder)) for word in words]
    config = compose([f"model={tiny_model_folder}", "algorithm=grpo", *words], algorithms=algorithm_schemas()).config
    spec = ActorSpec(config, make_algorithm(config), open_source(config.model), 1, 1, LongestRow(8, 8))
    assert models._demand(spec, tiny_llama()).kl_copies == copies


def test_a_sliding_window_decides_whether_attention_is_flash() -> None:
    model = model_of("gemma3", torch.bfloat16, "meta", lora=False, checkpointing=False)
    found = [PassShapes.of(model, Demand(answer=answer), gpu=True) for answer in (4096, 4097)]
    assert [(shapes.flash, shapes.quadratic) for shapes in found] == [(True, False), (False, True)]


def test_the_measured_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = [p.clone() for p in model.parameters()]
    learner = Learner(model, LearnerConfig(), total_updates=1)
    allocated = iter([100, 350])  # before the forward pass, and between it and the backward pass
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert learner._trial_pass(32) == 250
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_no_pass_takes_more_than_its_prediction(compiled: bool) -> None:
    """A row of 4,096 tokens through a model of 100 million weights, with activations kept and recomputed."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "max_position_embeddings": 8192}
    model = tiny_llama(vocabulary=32_768, dtype=torch.bfloat16, **sizes, num_attention_heads=16).cuda()
    learner = Learner(model, LearnerConfig(compile=compiled), total_updates=1)
    for checkpointing in (False, True):
        learner.plan_memory(Demand(answer=4096, checkpointing=checkpointing))
        assert learner._memory is not None
        learner._trial_pass(4096)  # compiles, and allocates workspaces
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        learner._trial_pass(4096)
        taken = torch.cuda.max_memory_allocated() - before
        plan = learner._memory.plan(4096)
        shapes = {"checkpointing": checkpointing, "logit_rows": plan.logit_rows}
        assert 0.4 < taken / learner._memory.peak(4096, 4096, **shapes) < 1.1
