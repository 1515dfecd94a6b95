"""A worker with the messages of the vLLM worker that samples with transformers, token by token.

    python fake_worker.py [MODE] SOCKET

MODE: `refuses` does not start; `dies` ends at the first request; `stays` does not end when asked; `slow` samples
slowly. It prints the commands that it gets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from covey.rollout.embedded.runner import draw
from covey.rollout.vllm.process import Message
from covey.rollout.vllm.worker import serve
from covey.types import Sampling
from covey.weights.files import file_digest


class FakeVllm:
    def __init__(self, mode: str, settings: Message) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if mode == "refuses":
            raise ValueError("no room for the cache")
        if mode == "stays":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        torch.set_num_threads(1)
        print("settings", sorted(settings.items()), flush=True)
        self.mode, self.eos_ids = mode, settings["eos_ids"]
        torch.manual_seed(99)  # not the learner's weights
        self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"])).eval()

    async def generate(self, prompt: list[int], sampling: Message, images: list[Message]) -> Message:
        if self.mode == "dies":
            print("the last words", flush=True)
            os._exit(3)
        wanted = Sampling(**(sampling | {"stop": tuple(sampling["stop"])}))
        ids: list[int] = []
        logprobs: list[float] = []
        try:
            while len(ids) < wanted.max_tokens and not (ids and ids[-1] in self.eos_ids):
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*prompt, *ids]])).logits[:, -1]
                token, logprob = draw(logits, [wanted], [len(ids)])
                ids.append(int(token))
                logprobs.append(float(logprob))
                await asyncio.sleep(0.05 if self.mode == "slow" else 0)
        except asyncio.CancelledError:
            print("aborted", flush=True)
            raise
        return {"ids": ids, "logprobs": logprobs, "stop": "eos" if ids[-1] in self.eos_ids else "length"}

    async def load_file(self, path: str, digest: str) -> None:
        assert file_digest(Path(path)) == digest
        weights = load_file(path)
        print("load_file", Path(path).name, flush=True)
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        tied = self.model.config.tie_word_embeddings
        assert not unknown and set(missing) <= ({"lm_head.weight"} if tied else set()), (missing, unknown)

    async def load_begin(self) -> None: ...

    async def load_bucket(self, handle: Message, layout: list[Message]) -> None: ...

    async def load_end(self) -> None: ...

    async def sleep(self) -> None:
        print("sleep", flush=True)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(float("nan"))  # as vLLM forgets them

    async def wake(self, what: list[str]) -> None:
        print("wake", *what, flush=True)

    def close(self) -> None:
        while self.mode == "stays":
            signal.pause()


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 2 else ""
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[-1])), lambda settings: FakeVllm(mode, settings)))
