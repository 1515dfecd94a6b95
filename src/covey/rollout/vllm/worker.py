"""The worker's side of the channel: settings first, then requests, any number at once, until the engine has gone."""

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
from typing import Any, Protocol

from covey.rollout.vllm.process import Message, frame, receive_async
from covey.weights.names import file_digest

COMMANDS = ("generate", "load_file", "load_begin", "load_bucket", "load_end", "sleep", "wake")


class Backend(Protocol):
    """What samples. Every command is a coroutine of this name; what it returns is the answer."""

    async def generate(self, prompt: list[int], sampling: Message) -> Message: ...

    async def load_file(self, path: str, digest: str) -> None: ...

    async def load_begin(self) -> None: ...

    async def load_bucket(self, handle: Message, layout: list[Message]) -> None: ...

    async def load_end(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self, what: list[str]) -> None: ...

    def close(self) -> None: ...


async def serve(connection: socket.socket, start: Callable[[Message], Backend]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    settings = await receive_async(reader)
    if settings is None:
        return
    try:
        backend = start(settings)
    except Exception as error:
        writer.write(frame({"id": 0, "error": _words(error)}))
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
            if do != "generate":  # what was aborted is out of the way before weights change
                await _cancelled(tasks)
            task = asyncio.create_task(_answer(writer, number, getattr(backend, do), message))
            tasks[number] = task
            task.add_done_callback(functools.partial(tasks.pop, number))  # the task itself is pop's default
    finally:
        backend.close()


async def _cancelled(tasks: dict[int, asyncio.Task[None]]) -> None:
    ending = [task for task in tasks.values() if task.cancelling()]
    if ending:
        await asyncio.wait(ending)


async def _answer(writer: asyncio.StreamWriter, number: int, command: Callable[..., Any], given: Message) -> None:
    try:
        answer: Message = {"id": number, "done": await command(**given) or {}}
    except Exception as error:
        answer = {"id": number, "error": _words(error)}
    writer.write(frame(answer))
    await writer.drain()


def _words(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


# -- vLLM in a process of its own: `python -m covey.rollout.vllm.worker SOCKET`, started by the engine -----------------

EXTENSION = "covey.weights.vllm_extension.Extension"


class Vllm:
    def __init__(self, settings: Message) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.eos_ids = list(settings["eos_ids"])
        gpu = bool(settings["devices"])
        self.llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=settings["model"],
                load_format="dummy",  # weights are the learner's, from the first publish on
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
                logprobs_mode="processed_logprobs",  # of the distribution drawn from
                worker_extension_cls=EXTENSION,
                generation_config="vllm",  # no sampling settings of the model's own
                disable_log_stats=True,
            )
        )

    async def generate(self, prompt: list[int], sampling: Message) -> Message:
        from vllm.inputs import TokensPrompt

        request = self.llm.generate(TokensPrompt(prompt_token_ids=prompt), self._params(sampling), os.urandom(8).hex())
        async for out in request:
            (answer,) = out.outputs
        ids = [int(token) for token in answer.token_ids]
        if sampling["temperature"] == 0:
            logprobs = [0.0] * len(ids)
        else:
            logprobs = [float(at[token].logprob) for token, at in zip(ids, answer.logprobs, strict=True)]
        return {"ids": ids, "logprobs": logprobs, "stop": _stop(answer)}

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
            ignore_eos=True,  # stop_token_ids has them all
            logprobs=0,  # the sampled token's alone
            detokenize=bool(sampling["stop"]),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def load_file(self, path: str, digest: str) -> None:
        if file_digest(Path(path)) != digest:
            raise RuntimeError(f"{path} does not match its checksum")
        await self.load_begin()
        await self._everywhere("covey_load_file", path)
        await self.load_end()

    async def load_begin(self) -> None:
        await self._everywhere("covey_load_begin")

    async def load_bucket(self, handle: Message, layout: list[Message]) -> None:
        await self._everywhere("covey_load_bucket", handle, layout)

    async def load_end(self) -> None:
        """What the old weights computed is void."""
        await self._everywhere("covey_load_end")
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use and cannot be emptied")

    async def sleep(self) -> None:
        """Memory of weights and cache is given back, and their contents are lost: new weights come before the end."""
        await self.llm.sleep(level=2)

    async def wake(self, what: list[str]) -> None:
        await self.llm.wake_up(what)

    async def _everywhere(self, method: str, *arguments: Any) -> None:
        await self.llm.collective_rpc(method, args=arguments)

    def close(self) -> None:
        self.llm.shutdown()


def _stop(answer: Any) -> str:
    if answer.finish_reason == "length":
        return "length"
    if answer.finish_reason != "stop":
        raise RuntimeError(f"the request ended by {answer.finish_reason}")
    return "stop" if isinstance(answer.stop_reason, str) else "eos"


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(connection, Vllm))
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # whatever vLLM started and did not end


if __name__ == "__main__":
    main()
