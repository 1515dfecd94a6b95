"""Messages → token ids, token for token: what was sampled stays as it was sampled.

The first prompt of a conversation is rendered whole. A later one is what is there already (the earlier prompt and the
sampled ids) followed by what the chat template adds: the end of the reply where the model did not sample it, the new
messages, and the beginning of the next reply. That addition is the difference of two renderings, so earlier turns are
never tokenised again. Templates write replies in a form of their own (trimmed, JSON spaced otherwise): that changes
nothing here.

A template may also rewrite the past: leave out thinking or the words beside a call, shorten old tool results, or write
a reply without the `<think>` that opened it in the prompt. The next prompt must then be what the model will be given in
use, so it is rendered whole, and the episode forks. A prompt continues an earlier one only if the rendering of all
messages begins with the rendering that the policy was given, goes on with the whole reply, and ends with what is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from covey.errors import InputError
from covey.protocols import NoRoom
from covey.types import Messages, StopReason, Turn

Tools = Sequence[Mapping[str, Any]] | None

PIECE = 2**16  # characters
ADDED_BY_A_CUT = 256  # tokens, at most: a cut through a text changes only the tokens around it
CONTEXT_USED_UP = "no room for a reply: the model's context is used up"
MARK = "covey-marks-this-place"
# Some tokenizers have these as special tokens, which decoding drops.
CALL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...


@dataclass(frozen=True)
class Said:
    """A reply and what it was a reply to. `message` is how it is written among messages from now on."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    stop: StopReason
    message: Mapping[str, Any]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.sampled_ids

    def opens(self, messages: Messages, tools: Tools) -> bool:
        """Whether messages are this conversation, its reply, and something new."""
        length = len(self.messages)
        return (
            len(messages) > length + 1
            and tools == self.tools
            and _same(messages[length], self.message)
            and tuple(messages[:length]) == self.messages
        )


def _same(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("role", "content", "tool_calls")
    return all((message.get(key) or None) == (other.get(key) or None) for key in keys)


class Renderer:
    """A tokenizer's chat template, in both directions."""

    def __init__(self, tokenizer: ChatTokenizer, context_length: int | None = None) -> None:
        """A prompt that is far longer than `context_length` raises `NoRoom` before all of it is tokenised."""
        self.tokenizer = tokenizer
        self.context_length = context_length

    def prompt(self, messages: Messages, tools: Tools = None) -> tuple[int, ...]:
        """Messages → prompt ids, ready for the assistant's answer."""
        return self._bounded(self._text(messages, tools, reply_next=True))

    def next_prompt(self, said: Said, new: Messages) -> tuple[int, ...] | None:
        """The prompt after a reply and new messages, continuing the ids of before; None where the template now writes
        the earlier messages or the reply differently, so that the conversation must be rendered anew."""
        given = self._text(said.messages, said.tools, reply_next=True)
        raw = self.decode(said.sampled_ids[:-1] if said.stop is StopReason.EOS else said.sampled_ids, special=True)
        forms = [
            (written, text)
            for written in (said.message, {"role": "assistant", "content": raw})
            if (text := self._try([*said.messages, written, *new], said.tools, reply_next=True)) is not None
        ]
        for written, after in forms:
            addition = self._after_reply(said, written, after, given + raw)
            # Compared with the message itself; with its text alone only where the template refuses the message.
            if addition is not None and _joins(forms[0][1], given, raw, forms[0][0], addition):
                return said.ids + self._addition(addition, said)
        return None

    def _after_reply(self, said: Said, written: Mapping[str, Any], after: str, spoken: str) -> str | None:
        """What the rendering `after` has behind the reply: its end, the new messages, the beginning of the next reply.
        None where the end of the reply is not found."""
        before = self._try([*said.messages, written], said.tools, reply_next=False)
        if before is not None and after.startswith(before):
            return self.tail + after[len(before) :]
        # Some templates write the last reply differently from one that is followed by something.
        return after[len(spoken) :] if after.startswith(spoken + self.tail) else None

    def reply(
        self, messages: Messages, message: Mapping[str, Any], tools: Tools, ends: Sequence[int]
    ) -> tuple[int, ...]:
        """What the model would have had to sample to say `message` after `messages`: the ids of the text that the
        template writes for it, and the token that ends a turn, one of `ends`."""
        asked = self._text(messages, tools, reply_next=True)
        whole = self._text([*messages, message], tools, reply_next=False)
        begun = self._text(messages, tools, reply_next=False) + self.head
        # A prompt may open what is no part of a past reply (thinking): then the reply follows the plain beginning.
        shown = next((whole[len(start) :] for start in (asked, begun) if whole.startswith(start)), None)
        calls = bool(message.get("tool_calls"))
        if shown is None and calls:
            raise TemplateError("this model's chat template rewrites the conversation before a reply that calls tools")
        if shown is None or not (calls or _holds(shown, message)):  # it leaves part of the reply out: thinking
            return (*self._encode(_going_on(asked, str(message["content"]))), self._end("", ends)[1])
        text, end = self._end(shown, ends)
        return (*self._encode(text), end)

    def _end(self, text: str, ends: Sequence[int]) -> tuple[str, int]:
        """A reply as the template writes it → the reply itself, and the token that ends it."""
        marks = {self.decode([token], special=True): token for token in ends}
        if found := [(text.rfind(mark), mark) for mark in marks if mark in text]:
            place, mark = max(found)
            return text[:place], marks[mark]
        usual = [token for mark, token in marks.items() if mark in self.tail]
        return text.removesuffix(self.tail), usual[0] if usual else ends[0]

    @property
    def head(self) -> str:
        """What the template writes before a reply."""
        return self._frame[0]

    @property
    def tail(self) -> str:
        """What the template writes after a reply."""
        return self._frame[1]

    @cached_property
    def _frame(self) -> tuple[str, str]:
        asked = [{"role": "user", "content": "?"}]
        before = self._text(asked, None, reply_next=False)
        shown = self._text([*asked, {"role": "assistant", "content": MARK}], None, reply_next=False)
        head, _, tail = shown.removeprefix(before).rpartition(MARK)
        return head, tail

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """What a model said: without special tokens, but for those that mark a tool call."""
        if self._call_marks.isdisjoint(token_ids):
            return self.decode(token_ids)
        return self.decode([token for token in token_ids if token not in self._dropped], special=True)

    @cached_property
    def _dropped(self) -> frozenset[int]:
        """Special tokens that are no part of what was said."""
        added = {token for token, text in self.tokenizer.added_tokens_decoder.items() if text.special}
        return frozenset(added | {*self.tokenizer.all_special_ids}) - self._call_marks

    @cached_property
    def _call_marks(self) -> frozenset[int]:
        known = self.tokenizer.get_vocab()
        return frozenset(known[mark] for mark in CALL_MARKS if mark in known)

    def plain(self, text: str) -> str:
        """Text from outside in which nothing is read as a token of control: `<|im_end|>` becomes `< |im_end|>`."""
        for token in self._control:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def _control(self) -> tuple[str, ...]:
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple({str(token) for token in added if token.special} | {*self.tokenizer.all_special_tokens})

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that has at most so many tokens."""
        ids = self._encode(text)
        if len(ids) <= tokens:
            return text
        kept = self.decode(ids[:tokens], special=True)
        return kept.rstrip("\ufffd") if not text.startswith(kept) else kept  # a character cut in two

    def _text(self, messages: Messages, tools: Tools, *, reply_next: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._told(messages),
                    tools=list(tools) if tools else None,
                    add_generation_prompt=reply_next,
                    tokenize=False,
                )
            )
        except Exception as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TemplateError(
                f"this model's chat template cannot show messages with the roles {roles} ({error})\n"
                "  give another one: agent.template=qwen2.5, or a Jinja file"
            ) from error

    def _told(self, messages: Messages) -> list[dict[str, Any]]:
        """What came from outside after the first reply (tools, environments, users) has no tokens of control."""
        found = [dict(message) for message in messages]
        replies = [place for place, message in enumerate(found) if message.get("role") == "assistant"]
        for message in found[replies[0] :] if replies else ():
            if message["role"] != "assistant" and isinstance(message.get("content"), str):
                message["content"] = self.plain(message["content"])
        return found

    def _try(self, messages: Messages, tools: Tools, *, reply_next: bool) -> str | None:
        """A template may refuse a tool's result that no call of its own form asked for."""
        try:
            return self._text(messages, tools, reply_next=reply_next)
        except TemplateError:
            return None

    def _addition(self, text: str, said: Said) -> tuple[int, ...]:
        """What follows the sampled ids, without the end of turn where the model sampled it."""
        if said.stop is StopReason.EOS:
            text = text.removeprefix(self.decode(said.sampled_ids[-1:], special=True))
        return self._bounded(text)

    def _bounded(self, text: str) -> tuple[int, ...]:
        """The ids of a text; `NoRoom` where they are certainly more than the model's context.

        A tokenizer takes hundreds of bytes for each character, and some texts come from strangers. So a long one is
        first counted in pieces, until it has too many tokens: what that takes depends on the context, not on the text.
        """
        if self.context_length is not None and len(text) > max(4 * self.context_length, PIECE):
            tokens = 0
            for start in range(0, len(text), PIECE):
                tokens += len(self._encode(text[start : start + PIECE])) - ADDED_BY_A_CUT
                if tokens >= self.context_length:
                    raise NoRoom(CONTEXT_USED_UP)
        return self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]


class TemplateError(InputError):
    """The chat template refused a conversation."""


def _joins(now: str, given: str, raw: str, message: Mapping[str, Any], addition: str) -> bool:
    """Whether the rendering `now` is what the policy was given, the whole reply in whatever form, and the addition."""
    if not (now.startswith(given) and now[len(given) :].endswith(addition)):
        return False
    reply = now[len(given) :].removesuffix(addition)
    return reply == raw or _holds(reply, message)


def _holds(shown: str, message: Mapping[str, Any]) -> bool:
    """Whether a rendering has all that a message says, but for white space: its content, and the names it calls."""
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    parts = (str(message.get("content") or ""), *(str(call.get("name")) for call in calls))
    squeezed = "".join(shown.split())
    return all("".join(part.split()) in squeezed for part in parts)


def _going_on(asked: str, content: str) -> str:
    """Content without its beginning where the prompt has said that already, as templates do that open the thinking."""
    overlap = next(size for size in range(len(content), -1, -1) if asked.endswith(content[:size]))
    return content[overlap:]


# -- Demonstrations as the turns that a model would have taken, token for token as in sampling -------------------------
# Each message of the assistant becomes a turn: the prompt that `EpisodePolicy` would have sent (what is there already,
# and what the template adds), and the reply as the model would have sampled it, its end of turn included. Where the
# template rewrites history the next prompt starts anew, and the demonstration forks into several rows.


def demonstrated(renderer: Renderer, messages: Messages, tools: Tools, ends: Sequence[int]) -> tuple[Turn, ...]:
    """The turns of the assistant. `ends` are the ids that may end a turn. Raises `TemplateError`."""
    turns: list[Turn] = []
    said: Said | None = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tuple(messages[:place])
        prompt = None if said is None else renderer.next_prompt(said, before[len(said.messages) + 1 :])
        if prompt is None:
            prompt = renderer.prompt(before, tools)
        reply = renderer.reply(before, message, tools, ends)
        turns.append(Turn(prompt, reply, (0.0,) * len(reply), (0,) * len(reply), StopReason.EOS))
        said = Said(before, tools, prompt, reply, StopReason.EOS, message)
    return tuple(turns)
