"""vLLM in a process of its own: `python -m covey.rollout.vllm.worker SOCKET`, started by the engine.

`serve` reads the settings, then requests, any number at once, until the engine closes the connection. `Vllm` executes
them.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.images import picture
from covey.rollout.vllm.process import Message, frame, receive_async
from covey.types import Image
from covey.weights.files import file_digest
from covey.weights.vllm import EXTENSION

PICTURES = 256  # decoded ones that are kept: those of a group and of its next turns
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
        self.vision = settings["vision"]
        gpu = bool(settings["devices"])
        self.llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=settings["model"],
                # The first publish brings the learner's weights. A vision tower of vLLM's also has constants that are
                # not among them: random weights would replace these.
                load_format="auto" if self.vision else "dummy",
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
                mm_processor_kwargs=self.vision and {name: self.vision[name] for name in ("min_pixels", "max_pixels")},
            )
        )

    async def generate(self, prompt: list[int], sampling: Message, images: Sequence[Message]) -> Message:
        from vllm.inputs import TokensPrompt

        inputs = TokensPrompt(prompt_token_ids=prompt)
        if images:
            inputs = TokensPrompt(
                prompt_token_ids=with_placeholders(prompt, images, self.vision["token_id"]),
                multi_modal_data={"image": [opened(image, self.vision) for image in images]},
            )
        async for out in self.llm.generate(inputs, self._params(sampling), os.urandom(8).hex()):
            (completion,) = out.outputs
        if images and list(out.prompt_token_ids) != prompt:
            raise RuntimeError("vLLM's processor shows an image by other tokens than the learner's")
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
        """Finish loading, and flush what was computed with the old weights: prefixes, and features of images."""
        await self._call_workers("covey_load_end")
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use and cannot be emptied")
        if self.vision and self.vision["trained"]:
            if not hasattr(self.llm, "reset_encoder_cache"):
                raise RuntimeError("this vLLM keeps features of images: set model.freeze_vision=true, or update vLLM")
            await self.llm.reset_encoder_cache()

    async def sleep(self) -> None:
        """Release the memory of weights and cache. Their contents are lost, so weights must be loaded again after
        `wake`; those of a vision-language model are kept in CPU memory, for the constants among them."""
        await self.llm.sleep(level=1 if self.vision else 2)

    async def wake(self, what: list[str]) -> None:
        await self.llm.wake_up(what)

    async def _call_workers(self, method: str, *arguments: Any) -> None:
        await self.llm.collective_rpc(method, args=arguments)

    def close(self) -> None:
        self.llm.shutdown()


def with_placeholders(prompt: Sequence[int], images: Sequence[Message], token_id: int) -> list[int]:
    """The prompt with one token in place of each image, as vLLM's processors take it."""
    ids: list[int] = []
    end = 0
    for image in images:
        ids += [*prompt[end : image["start"]], token_id]
        end = image["start"] + image["length"]
    return [*ids, *prompt[end:]]


def opened(image: Message, vision: Message) -> Any:
    """The picture as the model sees it, so that vLLM's processor resizes nothing."""
    return _picture(image["content"], tuple(image["size"]), vision["max_pixels"], vision["resample"])


@functools.lru_cache(PICTURES)
def _picture(content: str, size: tuple[int, int], max_pixels: int, resample: int) -> Any:
    decoded = picture(Image("", base64.b64decode(content)), max_pixels)
    return decoded if decoded.size == size else decoded.resize(size, resample)


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
