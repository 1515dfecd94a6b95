"""A language model as a judge, behind an endpoint that speaks OpenAI's chat completions.

    reward=judge reward.options.judge.url=http://localhost:8000/v1 reward.options.judge.model=NAME

Its score is the number in the reply divided by `scale`. A reply without one is no score (None), and the extra
`judge/unparsed` counts them. Where the endpoint does not answer, the episode fails with the cause `judge`: an outage is
no opinion. The same question about the same answer is asked once; with `cache` also over several runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from covey.errors import Absent, EpisodeError, InputError, unknown
from covey.redact import hide_known
from covey.rewards.function import inline, result_of

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
NUMBER = r"(-?(?<!\d)\d++(?:\.\d++)?)"  # from its first digit: a long row of digits is looked at once
LONGEST_REPLY = 1 << 20  # bytes
SLOWEST_RETRY = 8.0  # seconds


class JudgeFailed(EpisodeError):
    """The endpoint gave no opinion."""

    cause = "judge"


@inline
@dataclass
class Judge:
    reward_name: ClassVar[str] = "judge"

    url: str  # http://HOST/v1
    model: str
    api_key_env: str | None = None  # the environment variable that holds the key
    prompt: str = PROMPT  # a text, or a file, with {question} {answer} {final_answer} {scale}
    scale: float = 10.0  # the best mark; the reward is the mark divided by it
    max_tokens: int | None = 1024  # of the judge's reply; null: not sent
    temperature: float | None = 0.0  # null: not sent
    max_concurrent: int = 16  # requests at once
    retries: int = 4  # after 429, 5xx and connections that fail
    seconds: float | None = None  # for one opinion, with its retries, from its turn on; null: reward.seconds
    cache: str | None = None  # a JSONL file of replies, read at the start and added to

    _patience: float = field(default=30.0, init=False)
    _known: dict[str, str] = field(default_factory=dict, init=False)  # replies by the hash of what was asked
    _asked: dict[str, Future[str]] = field(default_factory=dict, init=False)  # those under way
    _lock: Any = field(default_factory=threading.Lock, init=False)
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.url, self.model = str(self.url), str(self.model)
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"reward.options.judge.url={self.url}: write it whole, http://HOST:PORT/v1")
        if not self.url.rstrip("/").endswith("/chat/completions"):
            self.url = self.url.rstrip("/") + "/chat/completions"
        for key in ("scale", "max_concurrent"):
            if not getattr(self, key) > 0:
                raise InputError(f"reward.options.judge.{key} must be positive, got {getattr(self, key)}")
        if self.retries < 0:
            raise InputError(f"reward.options.judge.retries must be at least 0, got {self.retries}")
        if "\n" not in self.prompt and Path(self.prompt).is_file():
            self.prompt = Path(self.prompt).read_text()
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
        self._patience = self.seconds or seconds
        if self.cache is not None and Path(self.cache).is_file():
            text = Path(self.cache).read_text(errors="replace")
            if text and not text.endswith("\n"):  # what is added next must not be lost with that half line
                with Path(self.cache).open("a") as file:
                    file.write("\n")
            for line in text.splitlines():
                with suppress(ValueError, TypeError, KeyError):  # the last line of a run that was killed
                    record = json.loads(line)
                    self._known[record["key"]] = record["reply"]

    async def __call__(self, question: str, final_answer: str, answer: Any = None) -> dict[str, float | None]:
        values = {"question": question, "answer": answer, "final_answer": final_answer, "scale": f"{self.scale:g}"}
        prompt = FIELD.sub(lambda found: str(values[found[1]]), self.prompt)
        mark = read_mark(await self._reply(prompt), self.scale)
        return {"reward": None if mark is None else mark / self.scale, "unparsed": float(mark is None)}

    def close(self) -> None:
        self._closing.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _reply(self, prompt: str) -> str:
        request = self._request(prompt)
        key = hashlib.sha256(f"{self.url}\n{json.dumps(request, sort_keys=True)}".encode()).hexdigest()
        with self._lock:
            if key in self._known:
                return self._known[key]
            if key not in self._asked:
                self._threads = self._threads or ThreadPoolExecutor(self.max_concurrent, "covey-judge")
                self._asked[key] = self._threads.submit(self._ask, key, request)
            asked = self._asked[key]
        return await result_of(asked)

    def _request(self, prompt: str) -> dict[str, Any]:
        wanted = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}]} | {
            name: value for name, value in wanted.items() if value is not None
        }

    # --- on a thread

    def _ask(self, key: str, request: Mapping[str, Any]) -> str:
        try:
            reply = self._persist(request, time.monotonic() + self._patience)
            if read_mark(reply, self.scale) is not None:
                self._remember(key, reply)
            return reply
        finally:
            with self._lock:
                del self._asked[key]

    def _remember(self, key: str, reply: str) -> None:
        with self._lock:
            self._known[key] = reply
            if self.cache is not None:
                try:
                    with Path(self.cache).open("a") as file:
                        file.write(hide_known(json.dumps({"key": key, "reply": reply})) + "\n")
                except OSError as error:  # the opinion is there all the same
                    what = f"reward.options.judge.cache={self.cache}: {error.strerror}"
                    warnings.warn(f"{what}; no further reply is kept there", stacklevel=2)
                    self.cache = None

    def _persist(self, request: Mapping[str, Any], deadline: float) -> str:
        """Ask until there is an answer, nothing left to try, or no time."""
        for attempt in range(self.retries + 1):
            pause = min(SLOWEST_RETRY, 0.5 * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                return self._once(request, deadline)
            except urllib.error.HTTPError as error:
                why = f"{error.code} {error.reason}{_excerpt(error)}"
                if error.code != 429 and error.code < 500:
                    raise JudgeFailed(f"{self.url} refuses: {why}") from error
                if (wanted := error.headers.get("Retry-After", "")).isdigit():
                    pause = float(wanted)
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:  # no connection, no reply
                why = f"{type(error).__name__}: {error}"
            if attempt == self.retries or time.monotonic() + pause > deadline or self._closing.wait(pause):
                break
        raise JudgeFailed(f"{self.url} gave no answer after {attempt + 1} attempts: {why}")

    def _once(self, request: Mapping[str, Any], deadline: float) -> str:
        message = urllib.request.Request(  # noqa: S310 - http or https, as __post_init__ has seen to
            self.url, json.dumps(request).encode(), headers={"Content-Type": "application/json"}
        )
        if self.api_key_env is not None:  # for this address only: a redirect may lead anywhere
            message.add_unredirected_header("Authorization", f"Bearer {os.environ.get(self.api_key_env, '')}")
        body = b""
        patience = max(0.01, deadline - time.monotonic())
        with urllib.request.urlopen(message, timeout=patience) as response:  # noqa: S310 - as above
            while part := response.read1(1 << 16):
                body += part
                if time.monotonic() > deadline or len(body) > LONGEST_REPLY:
                    raise TimeoutError("the reply does not end")
        return str(json.loads(body)["choices"][0]["message"]["content"] or "")


def _excerpt(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(300).decode(errors="replace").strip()
    except (OSError, HTTPException):
        text = ""
    return f": {text}" if text else ""


def read_mark(reply: str, scale: float) -> float | None:
    """The mark in a judge's reply: `7/10`, `Score: 7`, a number on the last line, or the only one. None if there is
    none between 0 and the best, or no telling which."""
    text = reply.rpartition("</think>")[2].strip()
    last = text.splitlines()[-1] if text else ""
    found = (
        re.findall(rf"{NUMBER}\s*(?:/|out of)\s*{scale:g}\b", text, re.IGNORECASE)[-1:]
        or re.findall(rf"\b(?:score|rating|grade|mark)\b[^\d\n-]{{0,20}}{NUMBER}", text, re.IGNORECASE)[-1:]
        or re.findall(rf"^\W*?{NUMBER}\W*$", last)
        or re.findall(NUMBER, text)
    )
    mark = float(found[0]) if len(found) == 1 else -1.0
    return mark if 0 <= mark <= scale else None
