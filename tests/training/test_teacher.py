"""Runs with a teacher: convergence, prompts that only the teacher reads, a teacher behind an endpoint, resume."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey.agents.turns import ChatAgent
from covey.app.teacher import _model_config
from covey.config.schema import Config, ModelConfig, TeacherConfig
from covey.errors import InputError, RunFailed
from covey.models.loading import load_policy, open_source
from covey.rollout.rendering import Renderer
from covey.training import teacher as teacher_module
from covey.training.samples import to_samples
from covey.training.teacher import TeacherEndpoint, TeacherInputs, TeacherPrompts, privileged
from covey.types import Collected, Episode, Group, Sample, Task
from tests.conftest import byte_tokenizer
from tests.rollout.test_roles import turn
from tests.training.test_resume import EVALUATION, STEP, outcome, train, train_here

SMALL: dict[str, Any] = {
    "algorithm": "grpo",
    "teacher.alone": True,
    "data": {"train_batch_size": 4},
    "rollout": {"group_size": 16, "max_tokens": 2},
    "eval": {"before": False, "after": False},
    "logging": {"to": [], "verbosity": "warning"},
    "resume": "disable",
}
ROWS = [{"question": f"say {i}", "answer": "ab"[i % 2], "hint": f"the letter {'ab'[i % 2]}"} for i in range(4)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """`tiny_model_folder` with another last matrix, which a student can learn, and six more outputs."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    model = load_policy(open_source(ModelConfig(str(tiny_model_folder))), ModelConfig())
    torch.manual_seed(7)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.normal_(0, 0.3)
    model.resize_token_embeddings(model.config.vocab_size + 6)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(model: Path, steps: int, **settings: Any) -> list[dict[str, float]]:
    loop = {"total_steps": steps, "save_final": False}
    trainer = covey.Trainer(model=str(model), tasks=ROWS, reward=always, **{**SMALL, "loop": loop, **settings})
    return [dict(step.metrics) for step in trainer]


def always(final_answer: str) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"teacher.kl": "full"}, 0.1),
        ({"teacher.kl": "sampled"}, 0.3),  # the gradient has noise
        ({"teacher.kl": "full", "model.lora": {"rank": 32}, "learner.lr": 1e-2}, 0.1),
        ({"teacher.kl": "sampled", "mode": "async"}, 0.3),
    ],
    ids=["full", "sampled", "lora", "async"],
)
def test_the_student_becomes_its_teacher(
    tiny_model_folder: Path, teacher_folder: Path, settings: dict[str, Any], left: float
) -> None:
    """What is left of the KL after 150 steps."""
    given = {"learner.lr": 5e-3, "learner.schedule": "linear", "teacher.name": str(teacher_folder), **settings}
    metrics = run(tiny_model_folder, 150, **given)
    start, end = (sum(m["distill/kl"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert all(m["distill/share"] == 1.0 for m in metrics)
    assert start > 0.3 and abs(end) < left * start


@pytest.mark.parametrize("name", [pytest.param("initial", marks=pytest.mark.slow), "current"])
def test_the_policy_learns_from_itself_with_a_hint(tiny_model_folder: Path, name: str) -> None:
    """The KL is that between the start policy without and with the hint in its prompt."""
    hint = {"teacher.name": name, "teacher.prompt_template": "{question}? {hint}"}
    (full,) = run(tiny_model_folder, 1, **hint, **{"teacher.kl": "full"})
    (sampled,) = run(tiny_model_folder, 1, **hint)
    assert full["distill/share"] == sampled["distill/share"] == 1.0
    assert full["distill/kl"] > 0.01
    assert sampled["distill/kl"] == pytest.approx(full["distill/kl"], abs=0.3)  # an estimate from 128 tokens


def test_the_prompt_of_the_teacher() -> None:
    task = Task("1", ({"role": "user", "content": "hi"},), "b", {"hint": "{answer}"})
    messages = ({"role": "system", "content": "s"}, *task.messages, {"role": "assistant", "content": "x"})
    shown = privileged(messages, task, "{question} {hint} {answer}")
    assert [message["content"] for message in shown] == ["s", "hi {answer} b", "x"]  # what is filled in is text
    with pytest.raises(InputError, match="no solution, which teacher"):
        privileged(messages, task, "{solution}")
    renderer = Renderer(byte_tokenizer())
    prompts = TeacherPrompts("{question} {answer}", renderer, ChatAgent())
    group = Group(task, (Episode(task, (), ()),) * 2)
    first, other = renderer.prompt(task.messages), renderer.prompt(messages)
    rows = [Sample(ids, (5,), (True,), (0.0,), (0,), i) for i, ids in enumerate((first, other))]
    found = prompts.add_to(rows, Collected((group,)))
    assert found[0].teacher_prompt_ids == renderer.prompt([{"role": "user", "content": "hi b"}])
    assert found[1].teacher_prompt_ids == ()  # not the agent's first prompt
    with pytest.raises(InputError, match="no episode of this step"):
        prompts.add_to(rows[1:], Collected((group,)))


def test_prompts_of_the_teacher_with_rewards_of_roles() -> None:
    """Rows are numbered by role, and prompts by the task of their episode."""
    renderer = Renderer(byte_tokenizer())
    groups = []
    for name in "ab":
        task = Task(name, ({"role": "user", "content": name},), name.upper())
        opening = renderer.prompt(task.messages)
        turns = (turn("first", [*opening], [5]), turn("second", [*opening, 5], [6]))
        rewards = {"given": 0.0, "given/first": 1.0, "given/second": -1.0}
        groups.append(Group(task, (Episode(task, turns, (), rewards=rewards),) * 2))
    collected = Collected(tuple(groups))
    samples = to_samples(collected, {"given": 1.0})
    assert len(samples.roles) == 8
    inputs = TeacherInputs(TeacherPrompts("{question} {answer}", renderer, ChatAgent()))
    a, b = (renderer.prompt([{"role": "user", "content": text}]) for text in ("a A", "b B"))
    assert [row.teacher_prompt_ids for row in inputs.add_to(samples, collected).rows] == [a, a, (), (), b, b, (), ()]


# -- Endpoint ----------------------------------------------------------------------------------------------------------


@dataclass
class Vllm:
    """What a teacher needs of vLLM's server: /tokenize, and prompt_logprobs of /v1/completions."""

    model: Any
    tokenizer: Any = field(default_factory=byte_tokenizer)
    requests: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0
    most: int = 1000  # --max-logprobs
    url: str = ""
    context: int | None = None  # --max-model-len

    def reply(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            tokens = self.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
            return {"tokens": tokens} | ({} if self.context is None else {"max_model_len": self.context})
        assert path == "/v1/completions" and request["max_tokens"] == 1
        self.requests.append(request)
        ids = request["prompt"]
        assert self.context is None or len(ids) + request["max_tokens"] <= self.context, "vLLM refuses it"
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        columns: list[Any] = [None]
        for at, token in enumerate(ids[1:]):
            chosen = {*logprobs[at].topk(min(request["prompt_logprobs"], self.most)).indices.tolist(), token}
            columns.append({str(t): {"logprob": float(logprobs[at, t]), "rank": 1} for t in chosen})
        return {"choices": [{"text": "", "prompt_logprobs": columns}]}


@pytest.fixture
def vllm(tiny_model_folder: Path, teacher_folder: Path) -> Iterator[Vllm]:
    state = Vllm(load_policy(open_source(ModelConfig(str(teacher_folder))), ModelConfig()))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.failures -= 1
                body = json.dumps(state.reply(self.path, request)).encode() if state.failures < 0 else b""
            self.send_response(200 if body else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_scores_as_the_model_does(
    vllm: Vllm, tiny_model_folder: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "MAX_PAUSE", 0.01)
    vllm.failures = 3  # the first requests are repeated
    here = run(tiny_model_folder, 2, **{"teacher.name": str(teacher_folder)})
    there = run(tiny_model_folder, 2, **{"teacher.name": "big", "teacher.url": vllm.url})
    for name in ("distill/kl", "distill/share", "grad/norm", "advantage/std"):
        assert [m[name] for m in there] == pytest.approx([m[name] for m in here], rel=1e-3)
    assert len(vllm.requests) == 2 * 4 * 16 and {r["prompt_logprobs"] for r in vllm.requests} == {1}


@pytest.mark.parametrize("kl", ["sampled", "top_k"])
def test_a_row_that_fills_the_teachers_context_is_not_scored(vllm: Vllm, kl: str) -> None:
    """vLLM generates a token after the prompt that it scores, so the prompt must be shorter than the context."""
    vllm.context = 8
    warnings: list[str] = []
    config = TeacherConfig(name="big", url=vllm.url, kl=kl, top_k=2 if kl == "top_k" else TeacherConfig().top_k)
    endpoint = TeacherEndpoint(config, warnings.append)
    with closing(endpoint):
        endpoint.check_tokenizer(vllm.tokenizer)
        task = Task("t", ())
        turns = (turn("a", [5, 6, 7], [9] * size) for size in (4, 5))
        group = Group(task, tuple(Episode(task, (one,), (), rewards={"given": 0.0}) for one in turns))
        samples = to_samples(Collected((group,)), {"given": 1.0})
        for _ in range(2):
            done = endpoint.score(samples)
    assert [len(request["prompt"]) for request in vllm.requests] == [7, 7]
    assert [row.teacher_prompt_ids for row in done.rows] == [None, ()]
    assert len(warnings) == 1 and "reads 7 tokens" in warnings[0] and "1 of 2 rows" in warnings[0]


@pytest.mark.slow
def test_an_endpoint_sends_the_most_likely_tokens(vllm: Vllm, tiny_model_folder: Path, teacher_folder: Path) -> None:
    """KL over some tokens is below that over the vocabulary. The teacher's most likely tokens may be tokens that only
    it has."""
    full = run(tiny_model_folder, 1, **{"teacher.name": str(teacher_folder), "teacher.kl": "full"})
    settings = {"teacher.name": "big", "teacher.url": vllm.url, "teacher.kl": "top_k"}
    unused = vllm.model.lm_head.weight[-6:]
    with torch.no_grad():
        unused.mul_(3)
    some = run(tiny_model_folder, 1, **settings, **{"teacher.top_k": 10})
    assert 0 < some[0]["distill/kl"] < full[0]["distill/kl"]
    assert {r["prompt_logprobs"] for r in vllm.requests} == {10}
    vllm.most = 4
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed, match="--max-logprobs 10"):
        patch.setattr(teacher_module, "RETRIES", 0)
        run(tiny_model_folder, 1, **settings, **{"teacher.top_k": 10})


def test_an_endpoint_with_another_tokenizer_is_refused(vllm: Vllm, tiny_model_folder: Path) -> None:
    plain, vocabulary = vllm.tokenizer, vllm.tokenizer.get_vocab()
    one, other = vocabulary["a"], vocabulary["b"]

    def swapped(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [{one: other, other: one}.get(i, i) for i in plain(text)["input_ids"]]}

    vllm.tokenizer = swapped
    with pytest.raises(InputError, match=rf"token \d+ \('a'\) is \[{one}\] here and \[{other}\] at"):
        run(tiny_model_folder, 1, **{"teacher.name": "big", "teacher.url": vllm.url})


def test_an_endpoint_that_is_down_is_reported_and_the_run_has_failed(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(teacher_module, "MAX_PAUSE", 0.01)
    logging = {"to": ["console"], "output_dir": str(tmp_path)}
    settings = {"teacher.name": "big", "teacher.url": "http://127.0.0.1:9/v1", "logging": logging}
    with pytest.raises(RunFailed, match="gave no answer after 9 attempts"):
        run(tiny_model_folder, 1, **settings)
    assert "the teacher at http://127.0.0.1:9/v1 does not answer, trying again: URLError" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/*/run.json")
    info = json.loads(path.read_text())
    assert info["status"] == "failed" and "gave no answer after 9 attempts" in info["error"]


# -- Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "gvpo", "teacher.name": "TEACHER"}, "does not go with algorithm=gvpo"),
        (
            {"algorithm": "online_dpo", "teacher.name": "TEACHER"},
            "algorithm=online_dpo\n  its loss compares",
        ),
        ({"teacher.coef": 0.5}, "settings of a teacher, and no teacher"),
        ({"teacher.name": "nosuch"}, "teacher=nosuch: unknown model"),
        ({"teacher.name": "current"}, "gives no signal unless its prompt contains more than the policy's"),
        ({"teacher.name": "current", "teacher.prompt_template": "think!"}, "the same text for every task"),
        ({"teacher.name": "current", "teacher.prompt_template": "nofile.txt"}, "nofile.txt: no such file"),
        (
            {"teacher.name": "OTHER", "algorithm.filter_groups": True},
            "with teacher.alone=true rewards are not trained on",
        ),
        ({"teacher.name": "current", "teacher.prompt_template": "{solution}"}, "no solution, which"),
        ({"teacher.name": "current", "teacher.prompt_template": "{question}" * 110}, "longer than the context"),
        ({"teacher.name": "x", "teacher.url": "localhost/v1"}, "write the full address"),
        ({"teacher.name": "x", "teacher.url": "http://x/v1", "rollout.temperature": 0.5}, "those of temperature 1"),
        ({"teacher.name": "x", "teacher.url": "http://x/v1", "teacher.kl": "full"}, "which an endpoint does not send"),
        (
            {"teacher.name": "TEACHER", "teacher.top_k": 5},
            "teacher.top_k=5 is for teacher.kl=top_k, and teacher.kl=sam",
        ),
        ({"teacher.name": "TEACHER", "teacher.api_key_env": "KEY"}, "there is no teacher.url"),
        ({"teacher.name": "TEACHER", "teacher.kl": "top_k"}, "use teacher.kl=full"),
        ({"teacher.name": "TEACHER", "teacher.kl": "full", "teacher.discount": 1.0}, "is for teacher.kl=sampled"),
        ({"teacher.name": "OTHER"}, "first difference: id 9 is '6' here and 'z' there"),
    ],
)
def test_mistakes(
    tiny_model_folder: Path, teacher_folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("teacher.name") == "OTHER":
        shutil.copytree(teacher_folder, tmp_path / "other")
        file = tmp_path / "other" / "tokenizer.json"
        tokens = json.loads(file.read_text())
        vocabulary = tokens["model"]["vocab"]
        vocabulary["6"], vocabulary["z"] = vocabulary["z"], vocabulary["6"]
        file.write_text(json.dumps(tokens))
    places = {"TEACHER": str(teacher_folder), "OTHER": str(tmp_path / "other")}
    given = {**SMALL, "teacher.alone": "teacher.name" in settings, **settings}
    given |= {key: places[value] for key, value in given.items() if value in ("TEACHER", "OTHER")}
    with pytest.raises(InputError, match=message):
        covey.Trainer(model=str(tiny_model_folder), tasks=ROWS, reward=always, **given)


def test_a_teacher_in_this_process_is_not_quantized() -> None:
    config = Config(model=ModelConfig(quantization="nf4"), teacher=TeacherConfig("big", dtype="bfloat16"))
    model = _model_config(config)
    assert (model.name, model.dtype, model.quantization) == ("big", "bfloat16", None)


# -- Resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("teacher=TEACHER", "teacher.kl=sampled", "teacher.discount=0.5"),
        ("teacher=initial", "teacher.kl=full", "teacher.prompt_template='{question} {answer}'"),
    ],
    ids=["model", "start policy"],
)
def test_a_killed_run_continues_with_the_same_teacher(
    tmp_path: Path, tiny_model_folder: Path, teacher_folder: Path, settings: tuple[str, ...]
) -> None:
    words = ["algorithm=grpo", *(word.replace("TEACHER", str(teacher_folder)) for word in settings)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    train_here(whole, tiny_model_folder, *words)
    middle = EVALUATION * 2 + STEP * 4 + STEP // 2
    assert train(broken, tiny_model_folder, *words, kill_at_call=middle) == -signal.SIGKILL
    assert train(broken, tiny_model_folder, *words) == 0
    assert outcome(broken) == outcome(whole)
