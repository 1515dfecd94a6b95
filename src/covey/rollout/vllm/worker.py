"""vLLM in a process of its own: `python -m covey.rollout.vllm.worker SOCKET`, started by the engine.

`serve` reads the settings, then requests, any number at once, until the engine closes the connection. `Vllm` executes
them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.rollout.vllm.process import Message, frame, receive_async
from covey.weights.files import file_digest
from covey.weights.vllm import EXTENSION

COMMANDS = ("generate", "load_file", "load_begin", "load_bucket", "load_end", "sleep", "wake")


async def serve(connection: socket.socket, start: Callable[[Message], Any]) -> None:
    """`start(settings)` returns an object with a coroutine for each of COMMANDS, whose result is the reply, and
    `close`."""
    reader, writer = await asyncio.open_connection(sock=connection)
    settings = await receive_async(reader)
    if settings is None:
        return
    try:
        backend = start(settings)
    except Exception as error:
        writer.write(frame({"id": 0, "error": _describe(error)}))
        await writer.drain()
        raise
    writer.write(frame({"id": 0, "done": {}}))
    tasks: dict[int, asyncio.Task[None]] = {}
    try:
        while (message := await receive_async(reader)) is not None:
            number = message.pop("id")
            do = message.pop("do")
            if do == "abort":
                if number in tasks:
                    tasks[number].cancel()
                continue
            assert do in COMMANDS, do
            if do != "generate":  # aborted requests must have ended before weights change
                await _wait_for_cancelled(tasks)
            task = asyncio.create_task(_reply(writer, number, getattr(backend, do), message))
            tasks[number] = task
            task.add_done_callback(functools.partial(tasks.pop, number))  # the task itself is pop's default
    finally:
        backend.close()


async def _wait_for_cancelled(tasks: dict[int, asyncio.Task[None]]) -> None:
    ending = [task for task in tasks.values() if task.cancelling()]
    if ending:
        await asyncio.wait(ending)


async def _reply(writer: asyncio.StreamWriter, number: int, command: Callable[..., Any], arguments: Message) -> None:
    try:
        reply: Message = {"id": number, "done": await command(**arguments) or {}}
    except Exception as error:
        reply = {"id": number, "error": _describe(error)}
    writer.write(frame(reply))
    await writer.drain()


def _describe(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


class Vllm:
    """Executes the commands with vLLM's AsyncLLM."""

    def __init__(self, settings: Message) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.eos_ids = list(settings["eos_ids"])
        gpu = bool(settings["devices"])
        self.llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=settings["model"],
                load_format="dummy",  # the first publish brings the learner's weights
                dtype=settings["dtype"],
                max_model_len=settings["context_length"],
                max_num_seqs=settings["max_sequences"],
                tensor_parallel_size=settings["tensor_parallel"],
                gpu_memory_utilization=settings["memory"],
                enforce_eager=settings["eager"] or not gpu,
                enable_sleep_mode=settings["sleeps"],
                trust_remote_code=settings["trust_remote_code"],
                revision=settings["revision"],
                tokenizer_revision=settings["revision"],
                logprobs_mode="processed_logprobs",  # of the distribution sampled from
                worker_extension_cls=EXTENSION,
                generation_config="vllm",  # no sampling defaults from the model's folder
                disable_log_stats=True,
            )
        )

    async def generate(self, prompt: list[int], sampling: Message) -> Message:
        from vllm.inputs import TokensPrompt

        request = self.llm.generate(TokensPrompt(prompt_token_ids=prompt), self._params(sampling), os.urandom(8).hex())
        async for out in request:
            (completion,) = out.outputs
        ids = [int(token) for token in completion.token_ids]
        if sampling["temperature"] == 0:
            logprobs = [0.0] * len(ids)
        else:
            logprobs = [float(at[token].logprob) for token, at in zip(ids, completion.logprobs, strict=True)]
        return {"ids": ids, "logprobs": logprobs, "stop": _stop_reason(completion)}

    def _params(self, sampling: Message) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            min_p=sampling["min_p"],
            max_tokens=sampling["max_tokens"],
            seed=sampling["seed"],
            stop=list(sampling["stop"]),
            stop_token_ids=self.eos_ids,
            ignore_eos=True,  # stop_token_ids contains it
            logprobs=0,  # only the sampled token's
            detokenize=bool(sampling["stop"]),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def load_file(self, path: str, digest: str) -> None:
        if file_digest(Path(path)) != digest:
            raise RuntimeError(f"{path} does not match its checksum")
        await self.load_begin()
        await self._call_workers("covey_load_file", path)
        await self.load_end()

    async def load_begin(self) -> None:
        await self._call_workers("covey_load_begin")

    async def load_bucket(self, handle: Message, layout: list[Message]) -> None:
        await self._call_workers("covey_load_bucket", handle, layout)

    async def load_end(self) -> None:
        """Finish loading, and flush the prefix cache, which was computed with the old weights."""
        await self._call_workers("covey_load_end")
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use and cannot be emptied")

    async def sleep(self) -> None:
        """Release the memory of weights and cache. Their contents are lost, so weights must be loaded again after
        `wake`."""
        await self.llm.sleep(level=2)

    async def wake(self, what: list[str]) -> None:
        await self.llm.wake_up(what)

    async def _call_workers(self, method: str, *arguments: Any) -> None:
        await self.llm.collective_rpc(method, args=arguments)

    def close(self) -> None:
        self.llm.shutdown()


def _stop_reason(completion: Any) -> str:
    if completion.finish_reason == "length":
        return "length"
    if completion.finish_reason != "stop":
        raise RuntimeError(f"the request ended by {completion.finish_reason}")
    return "stop" if isinstance(completion.stop_reason, str) else "eos"


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(connection, Vllm))
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # including processes that vLLM started and left behind


if __name__ == "__main__":
    main()
