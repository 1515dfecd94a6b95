"""Demonstrations as turns: the same tokens as an episode in which the model sampled the same replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from covey.errors import InputError
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer, render_demonstration
from covey.training.samples import episode_rows
from covey.types import Completion, Episode, Sampling, StopReason, Task, Turn
from tests.conftest import byte_tokenizer

EOS = 2
LOOP = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THOUGHT = (
    "{% if '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
)
TEMPLATES = {
    "plain": LOOP + "{{ m['content'] }}" + END,
    "trims": LOOP + "{{ m['content'] | trim }}" + END,
    # Thinking is shown in the last message only, as it is sampled.
    "forgets": LOOP + "{% if loop.last %}{{ m['content'] }}{% else %}" + THOUGHT + "{% endif %}" + END,
    # Thinking is never shown, not even in the last.
    "never shows": LOOP + THOUGHT + END,
    # The prompt opens the thinking.
    "opens": LOOP + "{{ m['content'] }}" + END.replace("assistant\n", "assistant\n<think>\n"),
    "no end": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4."},
]
THINKING = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "<think>\nha\n</think>\n\n4"},
]


def renderer(template: str = "plain") -> Renderer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    return Renderer(tokenizer)


def text(of: Renderer, ids: Sequence[int]) -> str:
    return of.decode(ids, special=True)


def rows(turns: Sequence[Turn]) -> list[Any]:
    return episode_rows(Episode(Task("t", ()), tuple(turns), ()), 0)


def shown(template: str, messages: list[dict[str, str]]) -> list[list[tuple[str, bool]]]:
    """Rows as pieces of text, each with whether it is learned."""
    of = renderer(template)
    found = []
    for row in rows(render_demonstration(of, messages, None, (EOS,))):
        pieces = [(text(of, row.prompt_ids), False)]
        for token, mask in zip(row.response_ids, row.mask, strict=True):
            piece = text(of, [token])
            pieces = (
                [*pieces[:-1], (pieces[-1][0] + piece, mask)] if pieces[-1][1] == mask else [*pieces, (piece, mask)]
            )
        found.append(pieces)
    return found


def test_only_the_replies_of_the_assistant_are_trained_on() -> None:
    assert shown("plain", TALK) == [
        [
            (
                "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
                False,
            ),
            ("2<|im_end|>", True),
            ("\n<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n", False),
            ("4.<|im_end|>", True),
        ]
    ]


def test_a_reply_of_weight_0_is_context() -> None:
    talk = [m | {"weight": int(m["content"] == "4.")} if m["role"] == "assistant" else m for m in TALK]
    ((*_, before, last),) = shown("plain", talk)
    assert last == ("4.<|im_end|>", True) and not before[1] and "\n2<|im_end|>" in before[0]


def test_replies_are_as_the_template_writes_them() -> None:
    spaced = [{**m, "content": f" {m['content']} "} for m in TALK]
    assert shown("trims", spaced) == shown("trims", TALK) == shown("plain", TALK)


def test_a_history_that_is_rewritten_forks() -> None:
    start = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    following = "\n<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n"
    for template in ("forgets", "never shows"):
        assert shown(template, THINKING) == [
            [(start, False), ("<think>\nhm\n</think>\n\n2<|im_end|>", True)],
            [(f"{start}\n\n2<|im_end|>{following}", False), ("<think>\nha\n</think>\n\n4<|im_end|>", True)],
        ]


def test_thinking_that_the_prompt_opens_is_not_repeated() -> None:
    (row,) = shown("opens", THINKING)
    assert [piece for piece, learned in row if learned] == [
        "hm\n</think>\n\n2<|im_end|>",
        "ha\n</think>\n\n4<|im_end|>",
    ]
    assert row[0][0].endswith("assistant\n<think>\n") and row[2][0].endswith("assistant\n<think>\n")


def test_where_a_template_ends_no_turn_the_tokenizers_token_does() -> None:
    (row,) = shown("no end", TALK)
    assert [piece for piece, learned in row if learned] == ["2<|im_end|>", "4.<|im_end|>"]
    assert row[2][0] == "\nuser: and 2+2?\nassistant: "


def test_a_template_that_refuses_is_an_input_error() -> None:
    of = renderer()
    of.tokenizer.chat_template = "{{ raise_exception('only two roles') }}"
    with pytest.raises(InputError, match="only two roles"):
        render_demonstration(of, TALK, None, (EOS,))


class Scripted:
    """An engine that samples the replies of the demonstration."""

    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self.replies = list(replies)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        reply = self.replies.pop(0)
        return Completion(reply, (0.0,) * len(reply), (0,) * len(reply), StopReason.EOS)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [TALK, THINKING], ids=["talk", "thinking"])
def test_the_tokens_are_those_of_an_episode_with_the_same_replies(
    template: str, messages: list[dict[str, str]]
) -> None:
    of = renderer(template)
    turns = render_demonstration(of, messages, None, (EOS,))
    policy = EpisodePolicy(Scripted([turn.completion_ids for turn in turns]), of, Sampling(), ("s",))  # type: ignore[arg-type]

    async def play() -> None:
        said: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "assistant":
                text = (await policy.ask(said)).text
                assert message["content"].endswith(text)  # without the mark of thinking that the prompt opened
                policy.remember(message)
            said.append(message)

    asyncio.run(play())
    assert tuple(policy.turns) == turns
