"""Chat requests with OpenAI's client: the responses, and the recorded episodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from covey.training.samples import episode_rows
from covey.types import Sampling, StopReason
from tests.conftest import tiny_llama
from tests.gateway.running_gateway import SEARCH, USER, RunningGateway, ScriptedEngine, serve_engine, tokenizer

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "quails"}}\n</tool_call>'


def sleepy(prompt: str, sampling: Sampling) -> str:
    """Searches first; answers once it has seen a result."""
    return "In the grass." if "<tool_response>" in prompt else f"Let me look.\n{CALL}"


@pytest.fixture
def gateway() -> Iterator[RunningGateway]:
    with serve_engine(ScriptedEngine(sleepy)) as made:
        yield made


def ask(client: Any, messages: Any = (USER,), **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=list(messages), **more)


def test_a_conversation_with_a_tool_is_one_row_of_sampled_tokens(gateway: RunningGateway) -> None:
    opened = gateway.open(task={"id": "q1", "messages": [USER], "answer": "grass", "hint": "low"})
    client = gateway.client(opened["key"])
    first = ask(client, tools=[SEARCH]).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "Let me look."
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("search", '{"query": "quails"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "Coturnix roosts on the ground."}
    second = ask(client, [USER, first.message, result], tools=[SEARCH]).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "In the grass.")
    assert gateway.post(f"/episodes/{opened['id']}/reward", json={"reward": 0.5}).status_code == 200

    episode = gateway.episode(opened["id"])
    one, two = episode.turns
    before = one.prompt_ids + one.completion_ids
    assert two.prompt_ids[: len(before)] == before
    between = gateway.engine.tokenizer.decode(list(two.prompt_ids[len(before) :]))
    assert between == (
        "\n<|im_start|>user\n<tool_response>Coturnix roosts on the ground.</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (row,) = episode_rows(episode, 0)
    assert row.prompt_ids == one.prompt_ids
    gap = len(two.prompt_ids) - len(before)
    assert row.mask == (True,) * len(one.completion_ids) + (False,) * gap + (True,) * len(two.completion_ids)
    assert row.logprobs == one.logprobs + (0.0,) * gap + two.logprobs
    assert episode.given == {"reward": 0.5} and episode.final_answer == "In the grass."
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.stop is StopReason.EOS


def test_turns_are_paid_while_the_episode_is_open() -> None:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        opened = gateway.open()
        address = f"/episodes/{opened['id']}"
        early = gateway.post(f"{address}/turn", json={"reward": 1.0})
        assert early.status_code == 400 and "there is no turn yet" in early.text
        client = gateway.client(opened["key"])
        first = ask(client).choices[0].message
        assert gateway.post(f"{address}/turn", key=opened["key"], json={"state": {"page": 1}}).status_code == 200
        assert gateway.post(f"{address}/turn", key=opened["key"], json={"reward": -0.5}).json()["turn"] == 0
        refused = gateway.post(f"{address}/turn", json={"reward": "much"})
        assert refused.status_code == 400 and "the reward of a turn must be None or a number" in refused.text
        ask(client, [USER, first, USER])
        assert gateway.post(f"{address}/reward", json={"reward": 2.0}).status_code == 200
        assert gateway.post(f"{address}/turn", json={"reward": 1.0}).status_code == 409
        episode = gateway.episode(opened["id"])
    assert [(turn.reward, turn.state) for turn in episode.turns] == [(-0.5, '{"page": 1}'), (None, None)]
    assert episode.reported == 1.5


def test_a_template_without_tools_gets_them_in_the_system_message_and_results_from_the_user() -> None:
    engine = ScriptedEngine(lambda prompt, _: "In the grass." if "<tool_response>\ngrass" in prompt else CALL)
    engine.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with serve_engine(engine) as gateway:
        opened = gateway.open()
        client = gateway.client(opened["key"])
        system = {"role": "developer", "content": "Be brief."}
        first = ask(client, [system, USER], tools=[SEARCH]).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "grass"}
        ask(client, [system, USER, first, result], tools=[SEARCH])
        gateway.post(f"/episodes/{opened['id']}/finish")
        one, two = gateway.episode(opened["id"]).turns
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    shown = engine.tokenizer.decode(list(two.prompt_ids))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "search"' in shown
    assert shown.endswith(
        "<|im_start|>user\n<tool_response>\ngrass\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_stream_is_the_whole_reply_in_pieces(gateway: RunningGateway) -> None:
    whole = ask(gateway.client(gateway.open()["key"]), tools=[SEARCH], logprobs=True)
    chunks = list(
        ask(
            gateway.client(gateway.open()["key"]),
            tools=[SEARCH],
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = whole.choices[0].message
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.id for part in parts if part.id] == [message.tool_calls[0].id]
    assert [part.function.name for part in parts if part.function.name] == ["search"]
    assert "".join(part.function.arguments or "" for part in parts) == message.tool_calls[0].function.arguments
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == "tool_calls" and set(ends[:-1]) == {None}
    logprobs = [e.logprob for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert logprobs == [entry.logprob for entry in whole.choices[0].logprobs.content]
    assert chunks[-1].usage == whole.usage


def test_several_replies_are_branches_each_a_turn_of_its_own() -> None:
    engine = ScriptedEngine(lambda prompt, sampling: "more" if "again" in prompt else f"say {sampling.seed % 1000}")
    with serve_engine(engine) as gateway:
        opened = gateway.open()
        client = gateway.client(opened["key"])
        choices = ask(client, n=4).choices
        texts = [choice.message.content for choice in choices]
        assert len(set(texts)) == 4 and [choice.index for choice in choices] == [0, 1, 2, 3]
        ask(client, [USER, choices[1].message, {"role": "user", "content": "again"}])
        gateway.post("/episodes/current/finish", key=opened["key"])
        episode = gateway.episode(opened["id"])
    assert sorted(map(engine.tokenizer.decode, [list(t.completion_ids[:-1]) for t in episode.turns[:4]])) == sorted(
        texts
    )
    continued = next(t for t in episode.turns if engine.tokenizer.decode(list(t.completion_ids[:-1])) == texts[1])
    before = continued.prompt_ids + continued.completion_ids
    assert episode.turns[4].prompt_ids[: len(before)] == before
    rows = episode_rows(episode, 0)
    assert sum(sum(row.mask) for row in rows) == episode.response_tokens  # every sampled token once


def test_log_probs_are_the_turns_and_usage_counts_tokens(gateway: RunningGateway) -> None:
    opened = gateway.open()
    reply = ask(gateway.client(opened["key"]), logprobs=True)
    gateway.post(f"/episodes/{opened['id']}/finish")
    (turn,) = gateway.episode(opened["id"]).turns
    entries = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == list(turn.logprobs)
    assert "".join(entry.token for entry in entries) == reply.choices[0].message.content
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.prompt_ids), len(turn.completion_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_where_a_reply_ends(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.open()["key"])
    stopped = ask(client, stop=["look"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("Let me ", "stop")
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        cut = ask(client, tools=[SEARCH], **limit).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("Let m", "length")
        assert cut.message.tool_calls is None


def test_tool_choice_none_shows_the_tools_and_reads_no_calls(gateway: RunningGateway) -> None:
    opened = gateway.open()
    reply = ask(gateway.client(opened["key"]), tools=[SEARCH], tool_choice="none").choices[0]
    assert reply.message.tool_calls is None and CALL in reply.message.content
    gateway.post(f"/episodes/{opened['id']}/finish")
    assert '"name": "search"' in gateway.engine.tokenizer.decode(
        list(gateway.episode(opened["id"]).turns[0].prompt_ids)
    )


def test_sampling_settings_of_requests_are_followed_without_training(gateway: RunningGateway) -> None:
    ask(gateway.client(gateway.open()["key"]), temperature=0.25, top_p=0.5)
    ask(gateway.client(gateway.open()["key"]))
    assert [(s.temperature, s.top_p) for s in gateway.engine.requests] == [(0.25, 0.5), (1.0, 1.0)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, "only 0 is supported"),
    "tool_choice": ({"tools": [SEARCH], "tool_choice": "required"}, "only auto and none"),
    "named tool": (
        {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "search"}}},
        "only auto and none",
    ),
    "response_format": ({"response_format": {"type": "json_object"}}, "only text"),
    "presence_penalty": ({"presence_penalty": 0.5}, "not supported"),
    "n": ({"n": 0}, "from 1 to 128"),
    "temperature": ({"temperature": -1}, "from 0"),
    "max_tokens": ({"max_tokens": 0}, "from 1"),
    "no messages": ({"messages": []}, "at least one message"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "must be one of"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "data:image/png;base64",
    ),
    "foreign result": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}]},
        "function call with a name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_in_openais_form(gateway: RunningGateway, name: str) -> None:
    from openai import BadRequestError

    fields, text = REFUSED[name]
    opened = gateway.open()
    answer = gateway.post("/v1/chat/completions", key=opened["key"], json={"messages": [USER], "model": "x"} | fields)
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]
    with pytest.raises(BadRequestError, match=text):
        ask(gateway.client(opened["key"]), extra_body=fields)
    assert gateway.engine.requests == []


def test_unknown_fields_are_ignored(gateway: RunningGateway) -> None:
    reply = ask(gateway.client(gateway.open()["key"]), user="me", seed=3, extra_body={"reasoning": {"effort": "low"}})
    assert reply.choices[0].message.content.startswith("Let me look.")


def test_a_full_context_is_reported_with_openais_code() -> None:
    from openai import BadRequestError

    with serve_engine(ScriptedEngine(sleepy), max_response_tokens=20) as gateway:
        opened = gateway.open()
        client = gateway.client(opened["key"])
        assert ask(client).choices[0].finish_reason == "length"
        with pytest.raises(BadRequestError, match=r"agent\.max_response_tokens is used up") as error:
            ask(client)
        assert error.value.code == "context_length_exceeded"
        gateway.post(f"/episodes/{opened['id']}/finish")
        assert gateway.episode(opened["id"]).stop is StopReason.LENGTH


def test_an_engine_failure_is_reported(gateway: RunningGateway) -> None:
    from openai import InternalServerError

    def broken(prompt: str, sampling: Sampling) -> str:
        raise OSError("out of feathers")

    gateway.engine.reply = broken
    with pytest.raises(InternalServerError, match="out of feathers"):
        ask(gateway.client(gateway.open()["key"]))


def test_sixty_four_clients_at_once() -> None:
    """Each has its own conversation: no token of one is in another."""
    engine = ScriptedEngine(lambda prompt, _: f"heard {prompt.rpartition('number ')[2].partition('<')[0]}")
    ready = threading.Barrier(64)
    with serve_engine(engine) as gateway:
        shared = gateway.client(gateway.registry.token)

        def play(number: int) -> str:
            client = shared.with_options(api_key=f"{gateway.registry.token}:player-{number}")
            ready.wait()
            talk: list[Any] = [{"role": "user", "content": f"number {number}"}]
            for turn in range(3):
                reply = ask(client, talk).choices[0].message
                assert reply.content == f"heard {number}{'.' * turn}"
                talk += [reply, {"role": "user", "content": f"number {number}{'.' * (turn + 1)}"}]
            closed = gateway.post("/episodes/current/reward", key=client.api_key, json={"reward": number})
            return str(closed.json()["id"])

        with ThreadPoolExecutor(64) as pool:
            idents = list(pool.map(play, range(64)))
        for number, ident in enumerate(idents):
            episode = gateway.episode(ident)
            assert episode.given == {"reward": number}
            (row,) = episode_rows(episode, 0)
            assert sum(row.mask) == episode.response_tokens == sum(len(f"heard {number}") + t + 1 for t in range(3))
    assert engine.most_at_once > 8


def test_a_client_that_disconnects_leaves_no_turn() -> None:
    import httpx

    hold = threading.Event()
    engine = ScriptedEngine(lambda prompt, _: "done")
    plain = engine.generate

    async def slow(token_ids: Any, sampling: Sampling) -> Any:
        import asyncio

        if not hold.is_set():
            hold.set()
            await asyncio.sleep(1.0)
        return await plain(token_ids, sampling)

    engine.generate = slow  # type: ignore[method-assign]
    with serve_engine(engine) as gateway:
        opened = gateway.open()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{gateway.url}/v1/chat/completions",
                headers={"authorization": f"Bearer {opened['key']}"},
                json={"messages": [USER]},
                timeout=0.5,
                trust_env=False,
            )
        assert ask(gateway.client(opened["key"])).choices[0].message.content == "done"
        time.sleep(1.5)  # the first would be done by now
        gateway.post(f"/episodes/{opened['id']}/finish")
        assert len(gateway.episode(opened["id"]).turns) == 1


def test_a_tiny_model_continues_from_its_own_tokens() -> None:
    """Sampled by the real engine: log-probs and ids of the second turn go on from the first."""
    from covey.rollout.embedded import EmbeddedEngine

    tokens = tokenizer()
    model = tiny_llama(vocabulary=len(tokens), eos_token_id=tokens.eos_token_id)
    engine = EmbeddedEngine(model, eos_ids=[tokens.eos_token_id], decode=tokens.decode, context_length=512)
    engine.tokenizer = tokens  # type: ignore[attr-defined]
    with serve_engine(engine, Sampling(max_tokens=12)) as gateway:
        opened = gateway.open()
        client = gateway.client(opened["key"])
        first = ask(client, logprobs=True).choices[0]
        second = ask(client, [USER, first.message, {"role": "user", "content": "And then?"}], logprobs=True).choices[0]
        gateway.post(f"/episodes/{opened['id']}/finish")
        one, two = gateway.episode(opened["id"]).turns
        engine.close()
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    assert [e.logprob for e in first.logprobs.content] == list(one.logprobs)
    assert [e.logprob for e in second.logprobs.content] == list(two.logprobs)
