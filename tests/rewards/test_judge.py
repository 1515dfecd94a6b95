"""A judge behind an endpoint: marks, garbage, outages, and what is asked only once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from covey.errors import Absent, InputError
from covey.rewards import RewardError, RewardSet, judge, resolve_rewards
from covey.rewards.judge import Judge, read_mark
from covey.types import Episode, Task

TASK = Task("t1", ({"role": "user", "content": "2+2?"},), "4")


class Endpoint:
    """Answers as the answer to be graded tells it to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.busy = self.busiest = 0
        lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = request["messages"][0]["content"]
                what = prompt.partition("Answer to grade:\n")[2].partition("\n")[0] or prompt
                with lock:
                    endpoint.asked[what] += 1
                    endpoint.requests.append((self.path, dict(self.headers), request))
                    endpoint.busy += 1
                    endpoint.busiest = max(endpoint.busiest, endpoint.busy)
                try:
                    endpoint.answer(self, what)
                except BrokenPipeError:  # who asked has given up
                    pass
                finally:
                    with lock:
                        endpoint.busy -= 1

            def do_GET(self) -> None:
                endpoint.requests.append((self.path, dict(self.headers), {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, what: str) -> None:
        status, body = 200, ""
        kind, _, rest = what.partition(" ")
        if kind == "say":
            body = json.dumps({"choices": [{"message": {"content": rest}}]})
        elif kind == "slow":
            time.sleep(float(rest))
            body = json.dumps({"choices": [{"message": {"content": "5"}}]})
        elif kind == "twice":  # busy, then well
            status = int(rest) if self.asked[what] == 1 else 200
            body = json.dumps({"choices": [{"message": {"content": "5"}}]})
        elif kind == "status":
            status, body = int(rest), "no such model"
        elif kind == "moved":
            status = 302
        elif kind == "drip":
            handler.send_response(200)
            handler.end_headers()
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)
            return
        else:
            body = "<html>"
        handler.send_response(status)
        if status == 429:
            handler.send_header("Retry-After", "0")
        if status == 302:
            handler.send_header("Location", "/elsewhere")
        handler.end_headers()
        handler.wfile.write(body.encode())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(judge, "MAX_PAUSE", 0.05)
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def judges(endpoint: Endpoint, *, seconds: float = 20.0, **options: Any) -> RewardSet:
    given = {"url": endpoint.url, "model": "m", **options}
    rewards = resolve_rewards("judge", None, {}, options={"judge": given})
    rewards.verify()
    rewards.open(seconds=seconds, device="cpu")
    return rewards


def attempt(reply: str) -> Episode:
    return Episode(TASK, (), (*TASK.messages, {"role": "assistant", "content": reply}))


def score(rewards: RewardSet, *replies: str) -> list[Any]:
    """The scores, or exceptions, of all replies at once."""

    async def all_at_once() -> list[Any]:
        scored = (rewards(TASK, attempt(reply)) for reply in replies)
        return await asyncio.gather(*scored, return_exceptions=True)

    try:
        return asyncio.run(all_at_once())
    finally:
        rewards.close()


def failure(result: Any) -> str:
    assert isinstance(result, RewardError) and result.cause == "judge"
    return result.why


# Marks


@pytest.mark.parametrize(
    ("reply", "mark"),
    [
        ("7", 7),
        ("  8.5\n", 8.5),
        ("**9**", 9),
        ("0", 0),
        ("7/10", 7),
        ("I would say 7 out of 10, for 2 reasons.", 7),
        ("Score: 6", 6),
        ("It makes 3 claims, and 2 are right.\nRating: **4**", 4),
        ("It makes 3 claims, and 2 are right.\n4", 4),
        ("<think>10? no, 2</think> 3", 3),
        ("a solid 6, I think", 6),
        ("3 claims, 2 right", None),  # no telling which
        ("excellent", None),
        ("", None),
        ("11", None),
        ("-1", None),
        ("100/10", None),
    ],
)
def test_the_mark_in_a_reply(reply: str, mark: float | None) -> None:
    assert read_mark(reply, 10.0) == mark


def test_request_and_score(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    rewards = judges(endpoint, scale=5, api_key_env="JUDGE_KEY")
    assert score(rewards, "say 4") == [{"judge": 0.8, "judge/unparsed": 0.0}]
    ((path, headers, request),) = endpoint.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert request["model"] == "m" and request["temperature"] == 0.0
    prompt = request["messages"][0]["content"]
    assert "Question:\n2+2?" in prompt and ":\n4\n" in prompt and "from 0 (wrong) to 5" in prompt


def test_the_key_does_not_follow_a_redirect(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (result,) = score(judges(endpoint, api_key_env="JUDGE_KEY", retries=0), "moved")
    assert "no answer" in failure(result)
    (_, first, _), (path, second, _) = endpoint.requests
    assert first["Authorization"] == "Bearer secret"
    assert path == "/elsewhere" and "Authorization" not in second


def test_custom_prompt(endpoint: Endpoint, tmp_path: Path) -> None:
    text = 'reply with JSON {"score": 1}: {final_answer} to {question}'
    score(judges(endpoint, prompt=text, temperature=None, max_tokens=None, retries=0), "an {answer}")
    ((_, _, request),) = endpoint.requests
    assert request["messages"][0]["content"] == 'reply with JSON {"score": 1}: an {answer} to 2+2?'
    assert set(request) == {"model", "messages"}
    (tmp_path / "p.txt").write_text("grade\n{final_answer}")
    made = Judge("http://x/v1", "m", prompt=str(tmp_path / "p.txt"))
    assert made.prompt == "grade\n{final_answer}" and made.url == "http://x/v1/chat/completions"


def test_a_reply_without_a_mark_is_unscored(endpoint: Endpoint) -> None:
    assert score(judges(endpoint), "say well done", "say 5") == [
        {"judge": None, "judge/unparsed": 1.0},
        {"judge": 0.5, "judge/unparsed": 0.0},
    ]


# Once


def test_equal_requests_are_sent_once(endpoint: Endpoint, tmp_path: Path) -> None:
    cache = tmp_path / "judged.jsonl"
    replies = ["slow 0.1", "say 3", "slow 0.1", "say 3", "slow 0.1", "say nothing"]
    first = score(judges(endpoint, cache=str(cache)), *replies)
    assert [table["judge"] for table in first] == [0.5, 0.3, 0.5, 0.3, 0.5, None]
    assert endpoint.asked == {"slow 0.1": 1, "say 3": 1, "say nothing": 1}
    with cache.open("a") as file:
        file.write('{"key": "torn')
    assert score(judges(endpoint, cache=str(cache)), *replies) == first
    assert endpoint.asked == {"slow 0.1": 1, "say 3": 1, "say nothing": 2}  # what had no mark is asked again
    for _ in range(2):  # what is added behind the torn line is not lost with it
        score(judges(endpoint, cache=str(cache), model="other"), "say 3")
        assert endpoint.asked["say 3"] == 2


def test_replies_are_kept_across_event_loops(endpoint: Endpoint) -> None:
    rewards = judges(endpoint)
    for _ in range(2):
        assert asyncio.run(rewards(TASK, attempt("say 3")))["judge"] == 0.3
    rewards.close()
    assert endpoint.asked["say 3"] == 1


def test_concurrency_limit(endpoint: Endpoint) -> None:
    result = score(judges(endpoint, max_concurrent=3, seconds=1.0), *(f"slow 0.0{i}" for i in range(10, 50)))
    assert [table["judge"] for table in result] == [0.5] * 40  # waiting for one's turn is not being late
    assert endpoint.busiest == 3


# Outages


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_retried(endpoint: Endpoint, status: int) -> None:
    assert score(judges(endpoint), f"twice {status}") == [{"judge": 0.5, "judge/unparsed": 0.0}]
    assert endpoint.asked == {f"twice {status}": 2}


def test_an_endpoint_that_stays_down_fails_the_episode(endpoint: Endpoint) -> None:
    down, refused, garbage = score(judges(endpoint, retries=2), "status 500", "status 404", "garbage")
    assert failure(down).endswith("gave no answer after 3 attempts: 500 Internal Server Error: no such model")
    assert failure(refused).endswith("refuses: 404 Not Found: no such model")
    assert "gave no answer after 3 attempts: JSONDecodeError" in failure(garbage)
    assert endpoint.asked == {"status 500": 3, "status 404": 1, "garbage": 3}


def test_no_server(endpoint: Endpoint) -> None:
    endpoint.server.server_close()
    assert "Connection refused" in failure(score(judges(endpoint, retries=1), "say 3")[0])


@pytest.mark.parametrize("what", ["slow 30", "drip"])
def test_a_slow_endpoint_times_out(endpoint: Endpoint, what: str) -> None:
    started = time.monotonic()
    why = failure(score(judges(endpoint, seconds=0.3), what)[0])
    assert "TimeoutError" in why or "timed out" in why
    assert time.monotonic() - started < 5


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m"}, "reward judge needs its option url\n  fix: reward.options.judge.url=VALUE"),
        (
            {"url": "localhost:8000"},
            "reward.options.judge.url=localhost:8000: write the full address, http://HOST:PORT/v1",
        ),
        ({"scale": 0}, "reward.options.judge.scale must be positive, got 0"),
        ({"scal": 0}, "unknown option of reward judge  scal\n  did you mean   scale?"),
        (
            {"prompt": "{final_answer} {quesion}"},
            "unknown field in reward.options.judge.prompt  quesion\n",
        ),
        ({"prompt": "{question}"}, "reward.options.judge.prompt has no {final_answer}"),
    ],
)
def test_mistakes_stop_before_training(options: dict[str, Any], message: str) -> None:
    given = options if "model" in options else {"url": "http://x/v1", "model": "m", **options}
    with pytest.raises(InputError) as caught:
        resolve_rewards("judge", None, {}, options={"judge": given})
    assert str(caught.value).startswith(message)


def test_a_key_that_is_not_there() -> None:
    given = {"url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY_HERE"}
    with pytest.raises(Absent, match="NO_SUCH_KEY_HERE: no such variable"):
        resolve_rewards("judge", None, {}, options={"judge": given}).verify()
