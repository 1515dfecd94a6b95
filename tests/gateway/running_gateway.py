"""A gateway in a thread of its own, with a scripted engine or a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from covey.gateway.registry import EpisodeRules, OpenEpisode, Registry
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.types import Completion, Episode, Sampling, StopReason

WHY = "the gateway's packages are not installed: pip install -e '.[serve]' openai httpx"
for package in ("fastapi", "uvicorn", "httpx", "openai"):
    pytest.importorskip(package, reason=WHY)

from covey.gateway.server import Server  # noqa: E402

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>{{ m['content'] }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
USER = {"role": "user", "content": "Where do quails sleep?"}


def tokenizer() -> Any:
    """One token per printable character, ChatML's marks, and a template that shows tools as Hermes models do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *letters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = TEMPLATE
    return wrapped


class ScriptedEngine:
    """Answers with `reply(prompt text, sampling)`, one token per letter, and the end of turn. The log-prob of the t-th
    token is −(t + 1) / 8."""

    owns_weights = False

    def __init__(self, reply: Callable[[str, Sampling], str]) -> None:
        self.tokenizer = tokenizer()
        self.reply = reply
        self.requests: list[Sampling] = []
        self.busy = 0
        self.most_at_once = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.requests.append(sampling)
        self.busy += 1
        self.most_at_once = max(self.most_at_once, self.busy)
        try:
            await asyncio.sleep(0.01)
        finally:
            self.busy -= 1
        text = self.reply(self.tokenizer.decode(list(token_ids)), sampling)
        stop = StopReason.EOS
        for end in sampling.stop:
            if end in text:
                text, stop = text[: text.index(end) + len(end)], StopReason.STOP
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [self.tokenizer.eos_token_id] if stop is StopReason.EOS else []
        if len(ids) > sampling.max_tokens:
            ids, stop = ids[: sampling.max_tokens], StopReason.LENGTH
        return Completion(tuple(ids), tuple(-(t + 1) / 8 for t in range(len(ids))), (0,) * len(ids), stop)


@dataclass
class RunningGateway:
    registry: Registry
    server: Server
    engine: Any
    closed: list[OpenEpisode]

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, key: str, **changes: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **changes)

    def post(self, path: str, key: str | None = None, **more: Any) -> Any:
        import httpx

        headers = {"authorization": f"Bearer {key or self.registry.token}"} | more.pop("headers", {})
        return httpx.post(self.url + path, headers=headers, timeout=60, trust_env=False, **more)

    def open(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/episodes", json=body)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def episode(self, ident: str) -> Episode:
        """A closed episode, as it is trained on."""
        (found,) = [one for one in self.closed if one.id == ident]
        return found.to_episode()


@contextmanager
def serve_engine(
    engine: Any,
    sampling: Sampling | None = None,
    context_length: int | None = None,
    vision: Any = None,
    **limits: Any,
) -> Iterator[RunningGateway]:
    """`covey serve` without a command line."""
    from covey.agents.formats.detect import choose_format

    tokens = engine.tokenizer
    numbers = count()
    renderer = Renderer(tokens, context_length, vision)

    def new_policy() -> EpisodePolicy:
        stream = (0, "test", next(numbers))
        return EpisodePolicy(engine, renderer, sampling or Sampling(max_tokens=200), stream, **limits)

    closed: list[OpenEpisode] = []
    rules = EpisodeRules("tiny", choose_format("auto", tokens, "llama"))
    server = Server(Registry(rules, new_policy=new_policy, on_closed=closed.append), 0)
    with running(server):
        yield RunningGateway(server.registry, server, engine, closed)


@contextmanager
def running(server: Server) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
