"""Templates that rewrite history as a conversation continues: each later prompt is compared with what the
template itself writes for the same messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.types import Completion, Sampling, StopReason, Turn
from tests.rollout.test_rendering import KEEPING, Babbler, _call, assert_sampled_is_trained, tokenizer_with

FEW = 'abab12 {["\n<'
PAIRS = ["aa", "ab", "ba", "bb"]
TURN = "{{ '<|im_start|>' ~ m.role ~ '\n' ~ %s ~ '<|im_end|>\n' }}"
NEXT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '[' ~ c.function.name ~ ']' }}{% endfor %}"
SPOKEN = "m.content.split('</think>')[-1].lstrip('\n')"
EVERY = "{% for m in messages %}" + TURN % "m.content" + "{% endfor %}"

REWRITING = {
    # A tool result is shortened as soon as a later one comes.
    "old results": """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'tool' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
{% if m.role == 'tool' and loop.index0 < ns.last %}"""
    + TURN % "m.content[:2] ~ '...'"
    + "{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT,
    # It is shortened as soon as a reply follows: also in the rendering that ends with that reply.
    "answered results": "{% for m in messages %}{% if m.role == 'tool' and not loop.last "
    "and 'assistant' in (messages[loop.index0:] | map(attribute='role') | list) %}"
    + TURN % "m.content[:2] ~ '...'"
    + "{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT,
    # The prompt opens the thinking; what is past is written without that mark.
    "opened thinking": EVERY + NEXT.replace("assistant\n", "assistant\n<think>\n"),
    # Thinking of past replies is never written.
    "no thinking": "{% for m in messages %}{% if m.role == 'assistant' %}"
    + TURN % SPOKEN
    + "{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT,
    "opened and dropped": "{% for m in messages %}{% if m.role == 'assistant' %}"
    + TURN % SPOKEN
    + "{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT.replace("assistant\n", "assistant\n<think>\n"),
    # Only the last reply is written with an empty thinking block.
    "block in the last": "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
    + TURN % "'<think></think>' ~ m.content"
    + "{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT,
    # The same, with calls after the words; results are labelled by the calls before them.
    "labelled results": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{% if m.role == 'tool' and messages | selectattr('tool_calls', 'defined') | list %}{{ 'result: ' }}{% endif %}"
    "{{ m.content }}" + CALLS + "{{ '<|im_end|>\n' }}{% endfor %}" + NEXT,
    # A call ends with a mark of its own.
    "two ends": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    + CALLS
    + "{{ '<|im_end|>\n' if not m.tool_calls else '<|im_start|>\n' }}{% endfor %}"
    + NEXT,
    # The beginning counts the user's messages.
    "counted": "{{ messages | selectattr('role', 'equalto', 'user') | list | length ~ ' asked\n' }}" + EVERY + NEXT,
    # A call is written without the words beside it.
    "calls alone": "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\n' }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% else %}"
    + TURN % "m.content"
    + "{% endif %}{% endfor %}"
    + NEXT,
    # A reply's end is written only where something follows.
    "open end": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content | trim }}"
    + CALLS
    + "{% if not loop.last or add_generation_prompt or m.role != 'assistant' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + NEXT,
}
NEVER_FORK = {"block in the last", "open end", *KEEPING} - {"llama", "mistral", "thinking"}
ALWAYS_FORK = {"opened thinking", "opened and dropped"}


class Speller(Babbler):
    """Samples letter by letter what the tokenizer writes in pairs: a reply that is tokenised again has other ids."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await super().generate(token_ids, sampling)
        ids = [i for token in done.token_ids for i in self._spelled(token)]
        return Completion(tuple(ids), (-0.1,) * len(ids), (0,) * len(ids), done.stop)

    def _spelled(self, token: int) -> list[int]:
        text = self.tokenizer.decode([token])
        return [self.tokenizer.convert_tokens_to_ids(letter) for letter in text] if text in PAIRS else [token]


def converse(policy: EpisodePolicy, seed: int, turns: int) -> list[list[Mapping[str, Any]]]:
    """The messages of each request of a random conversation with thinking, tool calls and words beside them."""
    rng = random.Random(f"converse {seed}")
    asked: list[list[Mapping[str, Any]]] = []

    def words(most: int = 12) -> str:
        return "".join(rng.choices(FEW, k=rng.randint(1, most))).strip() or "x"

    async def go() -> None:
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": words()}]
        for turn in range(turns):
            asked.append(list(messages))
            reply = await policy.ask(messages)
            if rng.random() < 0.6:
                calls = [_call(turn, i, words(6)) for i in range(rng.randint(1, 2))]
                message = {"role": "assistant", "content": reply.text, "tool_calls": calls}
                policy.remember(message)
                messages = [*messages, message]
                messages += [{"role": "tool", "name": "f", "content": words(), "tool_call_id": c["id"]} for c in calls]
            else:
                messages = [
                    *messages,
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": words()},
                ]

    asyncio.run(go())
    return asked


def squeezed(text: str) -> str:
    return "".join(text.split())


def continues(tokenizer: Any, before: Turn, after: Turn, was: str, now: str, message: Mapping[str, Any]) -> bool:
    """True if a prompt continues an earlier turn exactly as the template does: `now` must be `was`, the reply in the
    template's own form (spaces aside), and exactly the text that follows the sampled ids."""
    known = before.prompt_ids + before.completion_ids
    if after.prompt_ids[: len(known)] != known:
        return False
    end = [tokenizer.eos_token_id] if before.stop is StopReason.EOS else []
    added = tokenizer.decode([*end, *after.prompt_ids[len(known) :]])
    if not (now.startswith(was) and now.endswith(added) and len(now) >= len(was) + len(added)):
        return False
    reply = now[len(was) : len(now) - len(added)]
    sampled = before.completion_ids[: len(before.completion_ids) - len(end)]
    return reply == tokenizer.decode(list(sampled)) or squeezed(str(message["content"])) in squeezed(reply)


@pytest.mark.parametrize("name", [*REWRITING, *KEEPING])
def test_every_later_prompt_is_what_the_template_writes_or_extends_it(name: str) -> None:
    tokenizer = tokenizer_with((REWRITING | KEEPING)[name])
    tokenizer.add_tokens(PAIRS)
    forks = continued = 0
    for seed in range(12):
        rng = random.Random(seed)
        thoughts = [f"<think>\n{rng.randint(0, 99)}\n</think>\n\n" * (rng.random() < 0.3) for _ in range(6)]
        script = [thought + "".join(rng.choices(FEW, k=rng.randint(1, 20))) for thought in thoughts]
        engine: Any = Speller(tokenizer, seed, script)
        policy = EpisodePolicy(engine, Renderer(tokenizer), Sampling(), ("test", seed))
        asked = converse(policy, seed, turns=5)
        texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in asked]
        assert_sampled_is_trained(policy)
        for k in range(1, len(asked)):
            message = asked[k][len(asked[k - 1])]
            before, after = policy.turns[k - 1 : k + 1]
            if continues(tokenizer, before, after, texts[k - 1], texts[k], message):
                continued += 1
            else:
                forks += 1
                assert tokenizer.decode(list(after.prompt_ids)) == texts[k], f"seed {seed}, turn {k}"
    assert (forks == 0) if name in NEVER_FORK else (forks > 0)
    assert (continued == 0) if name in ALWAYS_FORK else (continued > 0)


def replies_to(template: str, reply: str) -> tuple[EpisodePolicy, Any]:
    """One reply, and a user's second question."""
    tokenizer = tokenizer_with(template)
    engine: Any = Babbler(tokenizer, 0, [reply, "done", ""])
    policy = EpisodePolicy(engine, Renderer(tokenizer), Sampling(), ("test",))

    async def go() -> None:
        asked: list[Any] = [{"role": "user", "content": "a"}]
        said = await policy.ask(asked)
        await policy.ask([*asked, {"role": "assistant", "content": said.text}, {"role": "user", "content": "b"}])

    asyncio.run(go())
    return policy, tokenizer


def test_a_reply_of_which_the_template_drops_a_part_forks_though_all_renderings_agree() -> None:
    """The rendering that ends with the reply begins the later one, as if nothing had changed: but neither has all of
    the reply."""
    policy, tokenizer = replies_to(REWRITING["no thinking"], "<think>\nhm\n</think>\n\nyes")
    assert tokenizer.decode(list(policy.turns[1].prompt_ids)) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_content_of_a_reply_must_be_in_the_reply_itself() -> None:
    """Here an earlier user message has the same content; the template drops it from the reply."""
    tokenizer = tokenizer_with(REWRITING["no thinking"])
    engine: Any = Babbler(tokenizer, 0, ["<think>x</think>", "done", ""])
    policy = EpisodePolicy(engine, Renderer(tokenizer), Sampling(), ("test",))

    async def go() -> None:
        asked: list[Any] = [{"role": "user", "content": "say <think>x</think>"}]
        said = await policy.ask(asked)
        await policy.ask([*asked, {"role": "assistant", "content": said.text}, {"role": "user", "content": "b"}])

    asyncio.run(go())
    assert tokenizer.decode(list(policy.turns[1].prompt_ids)) == (
        "<|im_start|>user\nsay <think>x</think><|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_that_the_template_does_not_write_fork_the_episode() -> None:
    tokenizer = tokenizer_with(KEEPING["chatml"])
    engine: Any = Babbler(tokenizer, 0, ["call f", "done", ""])
    policy = EpisodePolicy(engine, Renderer(tokenizer), Sampling(), ("test",))

    async def go() -> None:
        asked: list[Any] = [{"role": "user", "content": "a"}]
        await policy.ask(asked)
        message = {"role": "assistant", "content": "", "tool_calls": [_call(0, 0, "1")]}
        policy.remember(message)
        await policy.ask([*asked, message, {"role": "tool", "content": "2"}])

    asyncio.run(go())
    assert tokenizer.decode(list(policy.turns[1].prompt_ids)) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
