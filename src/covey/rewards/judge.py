"""The `judge` reward: a language model behind an OpenAI-compatible chat completions endpoint.

    reward=judge reward.options.judge.url=http://localhost:8000/v1 reward.options.judge.model=NAME

The reward is the mark in the judge's reply divided by `scale`. A reply without a mark gives None, counted by the extra
`judge/unparsed`. If the endpoint does not respond, the episode fails with the cause `judge` instead of scoring 0. Each
prompt is sent once per run, or with `cache` once for all runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from covey.endpoint import Endpoint, EndpointError
from covey.errors import Absent, EpisodeError, InputError, unknown
from covey.redact import hide_known
from covey.rewards.function import inline, result_of
from covey.storage import text_or_file

PROMPT = """\
You grade an answer to a question.

Question:
{question}

Reference answer (None if there is none):
{answer}

Answer to grade:
{final_answer}

How good is the answer? Reply with one number from 0 (wrong) to {scale} (right and complete), and nothing else."""
FIELDS = ("question", "answer", "final_answer", "scale")
FIELD = re.compile(r"\{(\w+)\}")
NUMBER = r"(-?(?<!\d)\d++(?:\.\d++)?)"  # from its first digit on, so a long run of digits is scanned once
MAX_REPLY = 1 << 20  # bytes
MAX_PAUSE = 8.0  # seconds between attempts


class JudgeFailed(EpisodeError):
    """The endpoint gave no reply."""

    cause = "judge"


@inline
@dataclass
@inline
class Judge:
    reward_name: ClassVar[str] = "judge"

    url: str  # http://HOST/v1
    model: str
    api_key_env: str | None = None  # the environment variable that holds the key
    prompt: str = PROMPT  # a text, or a file, with {question} {answer} {final_answer} {scale}
    scale: float = 10.0  # the highest mark; the reward is the mark divided by it
    max_tokens: int | None = 1024  # of the judge's reply; null: not sent
    temperature: float | None = 0.0  # null: not sent
    max_concurrent: int = 16  # concurrent requests
    retries: int = 4  # after 429, 5xx and connection errors
    seconds: float | None = None  # per request with retries, without time in the queue; null: reward.seconds
    cache: str | None = None  # a JSONL file of replies, read at the start and appended to

    _timeout: float = field(default=30.0, init=False)
    _replies: dict[str, str] = field(default_factory=dict, init=False)  # by the hash of the request
    _pending: dict[str, Future[str]] = field(default_factory=dict, init=False)  # by the hash of the request
    _lock: Any = field(default_factory=threading.Lock, init=False)
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.url, self.model = str(self.url), str(self.model)
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"reward.options.judge.url={self.url}: write the full address, http://HOST:PORT/v1")
        if not self.url.rstrip("/").endswith("/chat/completions"):
            self.url = self.url.rstrip("/") + "/chat/completions"
        for key in ("scale", "max_concurrent"):
            if not getattr(self, key) > 0:
                raise InputError(f"reward.options.judge.{key} must be positive, got {getattr(self, key)}")
        if self.retries < 0:
            raise InputError(f"reward.options.judge.retries must be at least 0, got {self.retries}")
        self.prompt = text_or_file(self.prompt)
        for name in FIELD.findall(self.prompt):
            if name not in FIELDS:
                raise unknown("field in reward.options.judge.prompt", name, FIELDS)
        if "final_answer" not in FIELD.findall(self.prompt):
            raise InputError("reward.options.judge.prompt has no {final_answer}: the judge would not see the answer")

    def verify(self) -> None:
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise Absent(f"reward.options.judge.api_key_env={self.api_key_env}: no such variable in the environment")
        if self.cache is not None and not Path(self.cache).absolute().parent.is_dir():
            raise InputError(f"reward.options.judge.cache={self.cache}: there is no such folder")

    def open(self, *, seconds: float, device: str) -> None:
        self._timeout = self.seconds or seconds
        if self.cache is not None and Path(self.cache).is_file():
            text = Path(self.cache).read_text(errors="replace")
            if text and not text.endswith("\n"):  # keep the next record off an incomplete last line
                with Path(self.cache).open("a") as file:
                    file.write("\n")
            for line in text.splitlines():
                with suppress(ValueError, TypeError, KeyError):  # an incomplete line of a killed run
                    record = json.loads(line)
                    self._replies[record["key"]] = record["reply"]

    async def __call__(self, question: str, final_answer: str, answer: Any = None) -> dict[str, float | None]:
        values = {"question": question, "answer": answer, "final_answer": final_answer, "scale": f"{self.scale:g}"}
        prompt = FIELD.sub(lambda match: str(values[match[1]]), self.prompt)
        mark = read_mark(await self._reply(prompt), self.scale)
        return {"reward": None if mark is None else mark / self.scale, "unparsed": float(mark is None)}

    def close(self) -> None:
        self._closing.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _reply(self, prompt: str) -> str:
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        request = {"model": self.model, "messages": [{"role": "user", "content": prompt}]} | {
            name: value for name, value in sampling.items() if value is not None
        }
        key = hashlib.sha256(f"{self.url}\n{json.dumps(request, sort_keys=True)}".encode()).hexdigest()
        with self._lock:
            if key in self._replies:
                return self._replies[key]
            if key not in self._pending:
                self._threads = self._threads or ThreadPoolExecutor(self.max_concurrent, "covey-judge")
                self._pending[key] = self._threads.submit(self._fetch, key, request)
            pending = self._pending[key]
        return await result_of(pending)

    # -- On a thread

    def _fetch(self, key: str, request: Mapping[str, Any]) -> str:
        try:
            reply = self._post(request, time.monotonic() + self._timeout)
            if read_mark(reply, self.scale) is not None:
                self._store(key, reply)
            return reply
        finally:
            with self._lock:
                del self._pending[key]

    def _store(self, key: str, reply: str) -> None:
        with self._lock:
            self._replies[key] = reply
            if self.cache is not None:
                try:
                    with Path(self.cache).open("a") as file:
                        file.write(hide_known(json.dumps({"key": key, "reply": reply})) + "\n")
                except OSError as error:  # the reply itself is still good
                    problem = f"reward.options.judge.cache={self.cache}: {error.strerror}"
                    warnings.warn(f"{problem}; no further reply is kept there", stacklevel=2)
                    self.cache = None

    def _post(self, request: Mapping[str, Any], deadline: float) -> str:
        endpoint = Endpoint(self.url, self.api_key_env, self.retries, MAX_REPLY, MAX_PAUSE, self._closing)
        try:
            return endpoint.post(request, lambda r: str(r["choices"][0]["message"]["content"] or ""), deadline)
        except EndpointError as error:
            raise JudgeFailed(str(error)) from error


def read_mark(reply: str, scale: float) -> float | None:
    """The mark in a judge's reply: `7/10`, `Score: 7`, a number alone on the last line, or the only number. None if it
    is ambiguous or not between 0 and `scale`."""
    text = reply.rpartition("</think>")[2].strip()
    last = text.splitlines()[-1] if text else ""
    numbers = (
        re.findall(rf"{NUMBER}\s*(?:/|out of)\s*{scale:g}\b", text, re.IGNORECASE)[-1:]
        or re.findall(rf"\b(?:score|rating|grade|mark)\b[^\d\n-]{{0,20}}{NUMBER}", text, re.IGNORECASE)[-1:]
        or re.findall(rf"^\W*?{NUMBER}\W*$", last)
        or re.findall(NUMBER, text)
    )
    mark = float(numbers[0]) if len(numbers) == 1 else -1.0
    return mark if 0 <= mark <= scale else None
