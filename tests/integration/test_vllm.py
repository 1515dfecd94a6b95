"""Sampling with vLLM itself, on tiny random models: `make vllm`. On a GPU if there is one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from covey.cli.main import main
from covey.rollout.embedded.runner import truncate
from covey.rollout.vllm import VllmEngine, VllmSettings
from covey.types import Completion, Sampling, StopReason
from tests.conftest import byte_tokenizer, tiny_llama
from tests.rollout.plain import Request, assert_as_alone

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make vllm", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCE = 1e-2 if GPU else 1e-3  # on a GPU vLLM multiplies float32 with fewer bits
EOS = 2
PROMPTS = [[3 + i, 40 - i, 7, 11 + 2 * i] for i in range(12)]
Found = TypeVar("Found")


SIZES = {
    **{"vocab_size": len(byte_tokenizer()), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"initializer_range": 0.1, "eos_token_id": EOS},
}


def tiny_qwen(seed: int = 0) -> Any:
    """With biases, and one matrix for input and output."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).to(DEVICE).eval()


def tiny_mixture(seed: int = 0) -> Any:
    """Experts in every layer, which transformers keeps in one tensor and model files one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, head_dim=32)).to(DEVICE).eval()


class Bench:
    """One engine for several tests, and one event loop: starting it takes most of the time."""

    def __init__(self, folder: Path, model: Any) -> None:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        settings = VllmSettings(
            str(folder),
            eos_ids=(EOS,),
            devices=(0,) if GPU else (),
            max_sequences=16,
            memory=0.05,
            eager=True,
            sleeps=GPU,
        )
        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine(settings, log=folder / "vllm.log", same_gpu=GPU)
        self.version = 0

    def close(self) -> None:
        self.engine.close()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Found]) -> Found:
        return self.loop.run_until_complete(work)

    def publish(self, model: Any) -> Any:
        self.version += 1
        self.run(self.engine.publish(model, self.version))
        return model

    def answers(self, requests: Sequence[Request]) -> list[Completion]:
        async def all_at_once() -> list[Completion]:
            return list(await asyncio.gather(*(self.engine.generate(*request) for request in requests)))

        return self.run(all_at_once())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("vllm"), tiny_qwen())
    yield bench
    bench.close()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids], device=DEVICE)).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def assert_greedy(model: Any, prompt: Sequence[int], ids: Sequence[int], count: int) -> None:
    """Every token is the likeliest, or as likely within the tolerance; the answer ends with EOS or at its length."""
    assert len(ids) == count or (ids[-1] == EOS and EOS not in ids[:-1])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([[*prompt, *ids]], device=DEVICE)).logits[0].cpu(), -1)
    at = logprobs[len(prompt) - 1 : -1]
    lost = at.max(-1).values - at.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    assert float(lost.max()) < TOLERANCE


def test_greedy_answers_are_those_of_a_plain_forward_pass(bench: Bench) -> None:
    model = bench.publish(tiny_qwen(1))
    done = bench.answers([(prompt, Sampling(0.0, max_tokens=16)) for prompt in PROMPTS])
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert_greedy(model, prompt, one.token_ids, 16)
    assert all(one.logprobs == (0.0,) * len(one.token_ids) for one in done)
    assert all(set(one.versions) == {bench.version} for one in done)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_learners(bench: Bench, temperature: float) -> None:
    model = bench.publish(tiny_qwen(2))
    requests = [(prompt, Sampling(temperature, max_tokens=24, seed=2**62 + i)) for i, prompt in enumerate(PROMPTS)]
    assert_as_alone(model, requests, bench.answers(requests), TOLERANCE)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_log_probs_are_of_the_distribution_drawn_from(bench: Bench, cut: dict[str, Any]) -> None:
    model = bench.publish(tiny_qwen(3))
    sampling = Sampling(0.9, max_tokens=12, **cut)
    done = bench.answers([(prompt, sampling) for prompt in PROMPTS])
    # Whether a token at the edge belongs to the set depends on rounding: both are right.
    edges = (0,) if "top_k" in cut else (-TOLERANCE, 0, TOLERANCE)
    near = [Sampling(0.9, max_tokens=12, **{name: value + edge for name, value in cut.items()}) for edge in edges]
    for prompt, one in zip(PROMPTS, done, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.token_ids]], device=DEVICE)).logits[0].cpu()
        all_MV = torch.log_softmax(logits / 0.9, -1)[len(prompt) - 1 : -1]
        chosen_M = torch.tensor(one.token_ids)[:, None]
        said_EM = torch.stack([truncate(all_MV, [each] * len(all_MV)).gather(-1, chosen_M)[:, 0] for each in near])
        found_M = torch.tensor(one.logprobs)
        assert bool((found_M >= said_EM.amin(0) - TOLERANCE).all())
        assert bool((found_M <= said_EM.amax(0) + TOLERANCE).all())


def test_a_seed_names_an_answer(bench: Bench) -> None:
    bench.publish(tiny_qwen(4))
    sampling = [Sampling(1.0, max_tokens=20, seed=seed) for seed in (7, 8)]
    first = bench.answers([(PROMPTS[0], one) for one in sampling])
    again = bench.answers([(PROMPTS[0], one) for one in sampling])
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert first[0].token_ids != first[1].token_ids


def test_published_weights_are_those_that_sample(bench: Bench) -> None:
    """The same prompts before and after: nothing that the old weights computed is left."""
    requests = [(prompt, Sampling(0.0, max_tokens=12)) for prompt in PROMPTS]
    answers = []
    for seed in (5, 6):
        model = bench.publish(tiny_qwen(seed))
        answers.append([list(one.token_ids) for one in bench.answers(requests)])
        for prompt, ids in zip(PROMPTS, answers[-1], strict=True):
            assert_greedy(model, prompt, ids, 12)
    assert answers[0] != answers[1]


def test_a_mixture_of_experts_samples_with_published_weights(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tiny_mixture())
    try:
        for seed in (0, 1):
            model = bench.publish(tiny_mixture(seed))
            requests = [(prompt, Sampling(1.0, max_tokens=16, seed=i)) for i, prompt in enumerate(PROMPTS)]
            assert_as_alone(model, requests, bench.answers(requests), TOLERANCE)
    finally:
        bench.close()


def test_adapters_are_published_merged(bench: Bench) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = peft.get_peft_model(tiny_qwen(7), lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    bench.publish(policy)
    requests = [(prompt, Sampling(1.0, max_tokens=12)) for prompt in PROMPTS]
    done = bench.answers(requests)
    assert_as_alone(policy, requests, done, TOLERANCE)
    with pytest.raises(AssertionError):  # the adapter is not nothing
        assert_as_alone(tiny_qwen(7), requests, done, TOLERANCE)


def test_the_token_that_ends_an_answer_is_part_of_it(bench: Bench) -> None:
    bench.publish(tiny_qwen(8))
    done = bench.answers([(PROMPTS[i % 12], Sampling(1.5, max_tokens=100, seed=i)) for i in range(40)])
    ended = [one for one in done if one.stop is StopReason.EOS]
    assert 5 < len(ended) < 40
    assert all(one.token_ids.index(EOS) == len(one.token_ids) - 1 for one in ended)
    assert all(EOS not in one.token_ids and len(one.token_ids) == 100 for one in done if one not in ended)
    assert {one.stop for one in done} == {StopReason.EOS, StopReason.LENGTH}
    assert all(len(one.logprobs) == len(one.token_ids) for one in done)


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(bench: Bench) -> None:
    model, tokenizer = bench.publish(tiny_qwen(9)), byte_tokenizer()
    whole = greedy(model, PROMPTS[3], 20)
    stop = tokenizer.decode(whole[4:6])
    assert len(stop) == 2
    (done,) = bench.answers([(PROMPTS[3], Sampling(0.0, max_tokens=20, stop=("never", stop)))])
    end = tokenizer.decode(whole).index(stop) + 2  # a token is a character
    assert list(done.token_ids) == whole[:end] and done.stop is StopReason.STOP


def test_an_answer_that_is_given_up_leaves_vllm(bench: Bench) -> None:
    bench.publish(tiny_qwen(10))

    async def give_up() -> None:
        task = asyncio.create_task(bench.engine.generate(PROMPTS[0], Sampling(0.0, max_tokens=400)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    bench.run(give_up())
    model = bench.publish(tiny_qwen(11))  # fails if something is under way
    (done,) = bench.answers([(PROMPTS[0], Sampling(0.0, max_tokens=8))])
    assert list(done.token_ids) == greedy(model, PROMPTS[0], 8)


def test_a_prompt_that_is_too_long_fails_alone(bench: Bench) -> None:
    bench.publish(tiny_qwen(12))

    async def both() -> list[Any]:
        calls = [bench.engine.generate(ids, Sampling(0.0, max_tokens=4)) for ids in ([5] * 600, PROMPTS[0])]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    bad, good = bench.run(both())
    assert isinstance(bad, RuntimeError) and "512" in str(bad)
    assert good.token_ids


@pytest.mark.skipif(not GPU, reason="sleep is a matter of GPU memory")
def test_a_paused_engine_gives_its_memory_back_and_wakes_with_new_weights(bench: Bench) -> None:
    bench.publish(tiny_qwen(13))
    awake = torch.cuda.mem_get_info()[0]
    bench.run(bench.engine.pause())
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - awake > 2**30
    model = bench.publish(tiny_qwen(14))
    bench.run(bench.engine.resume())
    requests = [(prompt, Sampling(1.0, max_tokens=12)) for prompt in PROMPTS]
    assert_as_alone(model, requests, bench.answers(requests), TOLERANCE)


WHOLE = (
    "rollout=vllm model=model model.dtype=float32 algorithm=grpo reward=rewards.py:variety learner.lr=1e-3 "
    "data.val_size=2 data.train_batch_size=3 rollout.group_size=4 rollout.max_tokens=12 rollout.memory=0.1 "
    "rollout.eager=true"
)


def train(folder: Path, settings: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[dict[str, Any]]]:
    """The run's folder and records, of a model whose matrices are not tied."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer), hidden_size=128, initializer_range=0.1, eos_token_id=EOS)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rewards.py").write_text("def variety(final_answer):\n    return len(set(final_answer)) / 10\n")
    monkeypatch.chdir(folder)
    assert main(["train", *WHOLE.split(), *settings.split()]) == 0
    (run,) = Path("outputs").glob("*/*")
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; the second samples with the weights that the first made."""
    run, records = train(tmp_path, "learner.offload_weights=true loop.total_steps=2", monkeypatch)
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    assert [record["kind"] for record in records] == ["eval", "step", "step", "eval"]
    assert all(0 <= step["rollout/mismatch"] < TOLERANCE for step in steps)
    assert all(step["correction/weight_mean"] == pytest.approx(1, abs=TOLERANCE) for step in steps)
    assert any(step["grad/norm"] > 0 for step in steps)
    assert (run / "vllm.log").stat().st_size > 0


def test_an_engine_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with new weights in between: the engine's log-probs are the learner's of the same weights."""
    pytest.importorskip("ray")
    settings = "cluster=ray cluster.rollout_devices=1 loop.total_steps=3 eval.before=false eval.after=false"
    run, records = train(tmp_path, settings, monkeypatch)
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    assert len(steps) == 3 and all(step["grad/norm"] > 0 for step in steps)
    assert all(0 <= step["rollout/mismatch"] < 1e-2 for step in steps)
    print("mismatch", [step["rollout/mismatch"] for step in steps])
    assert (run / "vllm-0.log").stat().st_size > 0
