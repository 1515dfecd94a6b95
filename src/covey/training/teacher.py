"""What a teacher needs besides its weights: prompts of its own, and the scores of a teacher behind an endpoint.

With a prompt template the teacher reads another question than the policy, with what only it may know: a solution, a
hint, feedback. The policy's tokens after it are the same. A row that does not begin with the agent's first prompt, as
after a rewritten history, is not scored.

An endpoint scores token ids with vLLM's `prompt_logprobs`: /v1/completions returns, for every token of a prompt, its
log-prob and those of the k most likely tokens.

Shapes: R rows, T tokens, K most likely tokens.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from covey.algorithms.distill import teacher_rows
from covey.config.schema import TeacherConfig
from covey.endpoint import Endpoint, EndpointError
from covey.errors import InputError, RunFailed
from covey.protocols import Agent
from covey.rollout.rendering import ChatTokenizer, Renderer
from covey.types import Collected, Messages, Sample, Samples, Task, TeacherTop

FIELD = re.compile(r"\{(\w+)\}")
MAX_REPLY = 1 << 28  # bytes: 20 log-probs of each of 100,000 tokens take about 200 MB
REQUESTS = 32  # at the same time
RETRIES, MAX_PAUSE = 8, 30.0
REPORTED = 3  # failed attempts of a request, after about 4 seconds
SECONDS = 600.0  # for one answer, with retries; then the run ends

# -- Prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TeacherPrompts:
    template: str
    renderer: Renderer
    agent: Agent

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The first prompt with the template in place of the last question."""
        messages, tools = self.agent.opening(task)
        return self.renderer.prompt(privileged(messages, task, self.template), tools)

    def add_to(
        self, rows: Sequence[Sample], collected: Collected, roles: Sequence[tuple[int, str]] = ()
    ) -> tuple[Sample, ...]:
        """The rows with their teacher prompts. `roles`: `Samples.roles`."""
        tasks = [group.task for group in collected.groups for _ in group.episodes]
        prompts = {
            task.id: (self.renderer.prompt(*self.agent.opening(task)), self.prompt(task))
            for task in (group.task for group in collected.groups)
        }

        def with_prompt(row: Sample) -> Sample:
            owner = roles[row.episode][0] if roles else row.episode
            first, teacher = prompts[tasks[owner].id]
            return replace(row, teacher_prompt_ids=teacher if row.prompt_ids == first else ())

        found = tuple(map(with_prompt, rows))
        if not any(row.teacher_prompt_ids for row in found):
            raise InputError(
                "teacher.prompt_template: no episode of this step begins with the agent's first prompt\n"
                "  the template replaces it, so it does not go with agents that write prompts of their own"
            )
        return found


def privileged(messages: Messages, task: Task, template: str) -> Messages:
    """The messages with the filled template as the content of the last user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise InputError(f"{task.where}: no user message that teacher.prompt_template could replace")
    values = {**task.columns, "question": messages[last]["content"], "answer": task.answer}
    for name in FIELD.findall(template):
        if values.get(name) is None:
            raise InputError(f"{task.where}: no {name}, which teacher.prompt_template shows to the teacher")
    text = FIELD.sub(lambda match: str(values[match[1]]), template)
    return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]


# -- Endpoint ----------------------------------------------------------------------------------------------------------


class TeacherEndpoint:
    def __init__(self, config: TeacherConfig, warn: Callable[[str], None] = lambda text: None) -> None:
        assert config.url is not None
        self.config = config
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(REQUESTS, "covey-teacher")
        self.url = config.url.rstrip("/")
        self.warn = warn
        self.longest: int | None = None  # tokens of a row that it can score; None: the endpoint does not say
        self._silent_until = 0.0  # of `_report`
        self._warned = False  # of `_fitting`

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raise unless the endpoint's tokenizer gives the same ids for a text with many characters and all control
        tokens. Its reply has its context too."""
        text = "".join([PROBE, *sorted(set(tokenizer.all_special_tokens))])
        ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]
        request = {"model": self.config.name, "prompt": text, "add_special_tokens": False}
        url = self.url.removesuffix("/v1") + "/tokenize"
        try:
            theirs, context = self._post(
                url, request, lambda reply: ([int(token) for token in reply["tokens"]], reply.get("max_model_len"))
            )
        except EndpointError as error:
            raise RunFailed(f"teacher.url: its tokenizer cannot be compared with the policy's\n  {error}") from error
        pairs = enumerate(zip([*ours, None], [*theirs, None], strict=False))
        if (first := next((at for at, (a, b) in pairs if a != b), None)) is not None:
            here = tokenizer.decode(ours[first : first + 1])
            raise InputError(
                f"teacher={self.config.name} has another tokenizer than the policy\n"
                f"  first difference in a test text: token {first} ({here!r}) is {ours[first : first + 1]} here and "
                f"{theirs[first : first + 1]} at {self.url}\n"
                "  distillation compares log-probs of the same tokens: take a teacher of the policy's family"
            )
        self.longest = None if context is None else int(context) - 1  # it also generates one token

    def score(self, samples: Samples) -> Samples:
        """The samples with the teacher's log-probs, or with its most likely tokens."""
        samples = replace(samples, rows=self._fitting(samples.rows))
        rows, shape = teacher_rows(samples.rows), samples.mask_RT.shape
        chosen = [i for i, row in enumerate(samples.rows) if row.teacher_prompt_ids != () and any(row.mask)]
        try:
            replies = list(self.threads.map(self._row, [rows[i] for i in chosen]))
        except EndpointError as error:
            raise RunFailed(f"the teacher: {error}\n  the run continues from its last checkpoint") from error
        if self.config.kl == "sampled":
            logprobs_RT = torch.zeros(shape)
            for i, reply in zip(chosen, replies, strict=True):
                logprobs_RT[i, : len(reply)] = torch.tensor([logprob for logprob, _ in reply])
            return replace(samples, teacher_logprobs_RT=logprobs_RT)
        ids_RTK = torch.zeros(*shape, self.config.top_k, dtype=torch.int64)
        logprobs_RTK = torch.zeros(*shape, self.config.top_k)
        for i, reply in zip(chosen, replies, strict=True):
            ids_RTK[i, : len(reply)] = torch.tensor([[token for token, _ in top] for _, top in reply])
            logprobs_RTK[i, : len(reply)] = torch.tensor([[logprob for _, logprob in top] for _, top in reply])
        return replace(samples, teacher_top=TeacherTop(ids_RTK, logprobs_RTK))

    def close(self) -> None:
        self.closing.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _fitting(self, rows: Sequence[Sample]) -> tuple[Sample, ...]:
        """The rows, those marked as not scored that are longer than what the endpoint reads."""
        if self.longest is None:
            return tuple(rows)
        too_long = [row.length > self.longest for row in teacher_rows(rows)]
        if any(too_long) and not self._warned:
            self._warned = True
            self.warn(
                f"the teacher at {self.url} reads {self.longest} tokens: {sum(too_long)} of {len(rows)} rows of this "
                "step are longer, and are not scored (distill/share); start it with a larger --max-model-len"
            )
        return tuple(
            replace(row, teacher_prompt_ids=()) if long else row for row, long in zip(rows, too_long, strict=True)
        )

    def _row(self, row: Sample) -> list[Scored]:
        """For each token of the response, its log-prob and the K most likely tokens with theirs."""
        ids, least = row.prompt_ids + row.response_ids, self.config.top_k if self.config.kl == "top_k" else 1
        request = {"model": self.config.name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": least}

        def read(reply: Any) -> list[Scored]:
            columns = reply["choices"][0]["prompt_logprobs"]
            if len(columns) != len(ids):
                raise ValueError(f"log-probs of {len(columns)} tokens, not of {len(ids)}")
            start = len(row.prompt_ids)
            return [_scored(columns[start + i], token, least) for i, token in enumerate(row.response_ids)]

        return self._post(f"{self.url}/completions", request, read)

    def _post(self, url: str, request: Mapping[str, Any], read: Any) -> Any:
        endpoint = Endpoint(url, self.config.api_key_env, RETRIES, MAX_REPLY, MAX_PAUSE, self.closing, self._report)
        return endpoint.post(request, read, time.monotonic() + SECONDS)

    def _report(self, attempts: int, why: str) -> None:
        """Say that requests are repeated, but not of each one."""
        if attempts >= REPORTED and time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + MAX_PAUSE
            self.warn(f"the teacher at {self.url} does not answer, trying again: {why}")


Scored = tuple[float, list[tuple[int, float]]]
PROBE = "".join(map(chr, range(32, 127))) + "\n\n\t 12345 naïve Größe 中文字 Привет مرحبا 🙂 def f(x):\n    return x\n"


def _scored(column: Mapping[str, Mapping[str, float]], token: int, least: int) -> Scored:
    top = sorted(((int(t), float(x["logprob"])) for t, x in column.items()), key=lambda pair: -pair[1])[:least]
    if len(top) < least:
        raise ValueError(f"{len(top)} log-probs per token, not {least}: lower teacher.top_k, or start vLLM with "
                         f"--max-logprobs {least}")  # fmt: skip
    return float(column[str(token)]["logprob"]), top


@dataclass(frozen=True)
class TeacherInputs:
    """Prepares the samples of a step for the teacher."""

    prompts: TeacherPrompts | None = None
    endpoint: TeacherEndpoint | None = None

    def add_to(self, samples: Samples, collected: Collected) -> Samples:
        if self.prompts is not None:
            samples = replace(samples, rows=self.prompts.add_to(samples.rows, collected, samples.roles))
        return samples if self.endpoint is None else self.endpoint.score(samples)
