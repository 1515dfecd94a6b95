"""Messages → token ids through the chat template. Sampled tokens keep their ids.

The first prompt of a conversation is rendered whole. A later prompt is the earlier prompt and the sampled ids, followed
by what the template adds: the end of turn if the model did not sample it, the new messages, and the generation prompt.
The addition is the difference of two renderings, so earlier turns are never tokenised again, even if the template would
write them differently (trimmed, other JSON spacing).

A template may also rewrite history: drop thinking or the text beside a call, shorten old tool results, or write a reply
without the `<think>` of its prompt. The next prompt must then be what the model will see in use, so it is rendered
whole and the episode forks. A prompt continues an earlier one only if the rendering of all messages is the rendering of
the earlier prompt, the whole reply, and the addition.

Only the template writes special tokens. In the texts of messages they are escaped, whoever wrote them: a user, a tool,
or a model, whose reply another role may read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from covey.errors import InputError
from covey.images import has_images, images_of
from covey.protocols import NoRoom
from covey.replies import escape, special_tokens
from covey.types import ImageSpan, Messages, Prompt, StopReason, Turn

if TYPE_CHECKING:
    from covey.models.vision import VisionProcessor

Tools = Sequence[Mapping[str, Any]] | None

PIECE = 2**16  # characters
CUT_TOKENS = 256  # the most tokens that cutting a text can add: only tokens at the cut change
CONTEXT_USED_UP = "no room for a reply: the model's context is used up"
MARK = "covey-marks-this-place"
# Special tokens in some tokenizers, which decoding would drop.
CALL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

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
class PastReply:
    """A reply and its prompt. `message` represents the reply in the messages of later turns."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    stop: StopReason
    message: Mapping[str, Any]
    images: tuple[ImageSpan, ...] = ()  # in the prompt

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.sampled_ids

    def is_continued_by(self, messages: Messages, tools: Tools) -> bool:
        """True if `messages` are this conversation, its reply, and at least one new message."""
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
    """Renders messages with a tokenizer's chat template, and decodes replies."""

    def __init__(
        self, tokenizer: ChatTokenizer, context_length: int | None = None, vision: VisionProcessor | None = None
    ) -> None:
        """A prompt far longer than `context_length` raises `NoRoom` before it is fully tokenised. `vision`: of a model
        that sees images."""
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vision = vision

    def prompt(self, messages: Messages, tools: Tools = None) -> tuple[int, ...]:
        """Messages → prompt ids, with the generation prompt."""
        return self.render(messages, tools).ids

    def render(self, messages: Messages, tools: Tools = None) -> Prompt:
        """Messages → prompt ids and the images among them, with the generation prompt."""
        text = self._text(self._escaped(messages), tools, reply_next=True)
        prompt = self._with_images(self._bounded(text), messages, before=0)
        if prompt is None:
            raise TemplateError(
                f"this model's chat template does not show all images: it wants one {self._placeholder} for each\n"
                "  give another one: agent.template, a Jinja file"
            )
        return prompt

    def _with_images(self, ids: tuple[int, ...], messages: Messages, before: int) -> Prompt | None:
        """The ids with the images of `messages` in place of their placeholders. None if there are not as many."""
        if self.vision is None:
            return Prompt(ids)
        images = images_of(messages)
        return self.vision.expand(ids, images, before) if ids.count(self.vision.token_id) == len(images) else None

    def next_prompt(self, reply: PastReply, new: Messages) -> Prompt | None:
        """The prompt after a reply and new messages, extending the ids of the reply. None if the template rewrites the
        earlier messages or the reply, so that the conversation must be rendered whole."""
        raw = self.decode(reply.sampled_ids[:-1] if reply.stop is StopReason.EOS else reply.sampled_ids, special=True)
        as_message, as_text, *added = map(self._escape, [reply.message, {"role": "assistant", "content": raw}, *new])
        raw = as_text["content"]
        reply = replace(reply, messages=tuple(self._escaped(reply.messages)))
        prompt = self._text(reply.messages, reply.tools, reply_next=True)
        renderings = [
            (message, text)
            for message in (as_message, as_text)
            if (text := self._try([*reply.messages, message, *added], reply.tools, reply_next=True)) is not None
        ]
        for message, text in renderings:
            addition = self._after_reply(reply, message, text, prompt + raw)
            # Checked against the message itself, or against the raw text if the template rejects the message.
            if addition is not None and _is_continuation(renderings[0][1], prompt, raw, renderings[0][0], addition):
                rest = self._with_images(self._addition(addition, reply), new, before=len(reply.ids))
                return None if rest is None else Prompt(reply.ids + rest.ids, reply.images + rest.images)
        return None

    def _after_reply(self, reply: PastReply, message: Mapping[str, Any], text: str, sampled: str) -> str | None:
        """The part of the rendering `text` after the reply: end of turn, new messages, generation prompt. None if the
        end of the reply is not found."""
        before = self._try([*reply.messages, message], reply.tools, reply_next=False)
        if before is not None and text.startswith(before):
            return self.tail + text[len(before) :]
        # Some templates write the last reply differently from one that is followed by messages.
        return text[len(sampled) :] if text.startswith(sampled + self.tail) else None

    def reply(
        self, messages: Messages, message: Mapping[str, Any], tools: Tools, ends: Sequence[int]
    ) -> tuple[int, ...]:
        """The ids that the model would have sampled for `message` after `messages`: the text that the template writes
        for it, and the token that ends the turn, one of `ends`. Special tokens in it are kept."""
        messages = self._escaped(messages)
        prompt = self._text(messages, tools, reply_next=True)
        rendered = self._text([*messages, message], tools, reply_next=False)
        history = self._text(messages, tools, reply_next=False) + self.head
        # A generation prompt may open thinking, which a past reply does not show: then it follows the history.
        written = next((rendered[len(start) :] for start in (prompt, history) if rendered.startswith(start)), None)
        calls = bool(message.get("tool_calls"))
        if written is None and calls:
            raise TemplateError("this model's chat template rewrites the conversation before a reply that calls tools")
        if written is None or not (calls or _contains(written, message)):  # the template drops thinking
            return (*self._encode(_without_overlap(prompt, str(message["content"]))), self._split_end("", ends)[1])
        text, end = self._split_end(written, ends)
        return (*self._encode(text), end)

    def _split_end(self, text: str, ends: Sequence[int]) -> tuple[str, int]:
        """A reply as the template writes it → its text, and the token that ends it."""
        marks = {self.decode([token], special=True): token for token in ends}
        if positions := [(text.rfind(mark), mark) for mark in marks if mark in text]:
            position, mark = max(positions)
            return text[:position], marks[mark]
        usual = [token for mark, token in marks.items() if mark in self.tail]
        return text.removesuffix(self.tail), usual[0] if usual else ends[0]

    @property
    def head(self) -> str:
        """The text that the template writes before a reply: the start of the turn."""
        return self._frame[0]

    @property
    def tail(self) -> str:
        """The text that the template writes after a reply: the end of the turn."""
        return self._frame[1]

    @cached_property
    def _frame(self) -> tuple[str, str]:
        question = [{"role": "user", "content": "?"}]
        before = self._text(question, None, reply_next=False)
        whole = self._text([*question, {"role": "assistant", "content": MARK}], None, reply_next=False)
        head, _, tail = whole.removeprefix(before).rpartition(MARK)
        return head, tail

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens except those that mark a tool call."""
        if self._call_marks.isdisjoint(token_ids):
            return self.decode(token_ids)
        return self.decode([token for token in token_ids if token not in self._dropped], special=True)

    @cached_property
    def _dropped(self) -> frozenset[int]:
        """Special tokens that are not part of the text of a reply."""
        added = {token for token, text in self.tokenizer.added_tokens_decoder.items() if text.special}
        return frozenset(added | {*self.tokenizer.all_special_ids}) - self._call_marks

    @cached_property
    def _call_marks(self) -> frozenset[int]:
        known = self.tokenizer.get_vocab()
        return frozenset(known[mark] for mark in CALL_MARKS if mark in known)

    def _escaped(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with special tokens in their texts escaped; in replies, except those that mark a tool call."""
        replies = (place for place, message in enumerate(messages) if message.get("role") == "assistant")
        start = next(replies, len(messages)) if self._is_text_only else 0
        return [dict(message) if place < start else self._escape(message) for place, message in enumerate(messages)]

    def _escape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        special = self._special_in_replies if message.get("role") == "assistant" else self._special
        return {key: value if key == "role" else escape(value, special) for key, value in message.items()}

    @cached_property
    def _is_text_only(self) -> bool:
        """Whether the template writes nothing itself (agent.template=none). Then a task may be a prompt that some other
        program has rendered, with special tokens."""
        return self._try([{"role": "user", "content": MARK}], None, reply_next=True) == MARK

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return special_tokens(self.tokenizer)

    @cached_property
    def _special_in_replies(self) -> tuple[str, ...]:
        return tuple(token for token in self._special if token not in CALL_MARKS)

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text, at most `tokens` tokens long."""
        ids = self._encode(text)
        if len(ids) <= tokens:
            return text
        kept = self.decode(ids[:tokens], special=True)
        return kept.rstrip("\ufffd") if not text.startswith(kept) else kept  # half of a character

    def _text(self, messages: Messages, tools: Tools, *, reply_next: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._for_template(messages),
                    tools=list(tools) if tools else None,
                    add_generation_prompt=reply_next,
                    tokenize=False,
                )
            )
        except InputError:
            raise
        except Exception as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TemplateError(
                f"this model's chat template cannot show messages with the roles {roles} ({error})\n"
                "  give another one: agent.template=qwen2.5, or a Jinja file"
            ) from error

    def _for_template(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with images as the template knows them, and without their placeholder in texts."""
        copies = [dict(message) for message in messages]
        if self.vision is not None:
            for message in copies:
                if "content" in message:
                    message["content"] = self._for_vision(message["content"])
        elif any(has_images(message.get("content")) for message in copies):
            raise InputError(
                "this model reads text only, but there are images in the messages\n  use a model that sees"
            )
        return copies

    def _for_vision(self, content: Any) -> Any:
        def without_placeholder(text: str) -> str:
            return text.replace(self._placeholder, f"{self._placeholder[0]} {self._placeholder[1:]}")

        content = _mapped(content, without_placeholder)
        return [{"type": "text", "text": content}] if isinstance(content, str) and self._wants_parts else content

    @property
    def _placeholder(self) -> str:
        return "" if self.vision is None else self.vision.placeholder

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template can only show content that is a list of parts."""
        try:
            message = {"role": "user", "content": MARK}
            return MARK not in str(self.tokenizer.apply_chat_template([message], tokenize=False))
        except Exception:  # a template may raise anything
            return True

    def _try(self, messages: Messages, tools: Tools, *, reply_next: bool) -> str | None:
        """None if the template rejects the messages, e.g. a tool's result without a call in the template's own form."""
        try:
            return self._text(messages, tools, reply_next=reply_next)
        except TemplateError:
            return None

    def _addition(self, text: str, reply: PastReply) -> tuple[int, ...]:
        """The ids that follow the sampled ids, without the end of turn if the model sampled it."""
        if reply.stop is StopReason.EOS:
            text = text.removeprefix(self.decode(reply.sampled_ids[-1:], special=True))
        return self._bounded(text)

    def _bounded(self, text: str) -> tuple[int, ...]:
        """The ids of a text; `NoRoom` if they certainly exceed the context.

        A tokenizer takes hundreds of bytes per character, and some texts are untrusted. So a long text is first counted
        in pieces until there are too many tokens: the cost depends on the context, not on the text.
        """
        if self.context_length is not None and len(text) > max(4 * self.context_length, PIECE):
            tokens = 0
            for start in range(0, len(text), PIECE):
                tokens += len(self._encode(text[start : start + PIECE])) - CUT_TOKENS
                if tokens >= self.context_length:
                    raise NoRoom(CONTEXT_USED_UP)
        return self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]


class TemplateError(InputError):
    """The chat template rejected a conversation."""


def _mapped(content: Any, change: Callable[[str], str]) -> Any:
    """Content with its texts changed; images become the parts that a chat template knows."""
    if isinstance(content, str):
        return change(content)
    if not has_images(content):
        return content
    return [
        {"type": "image"} if part["type"] == "image" else {"type": "text", "text": change(part["text"])}
        for part in content
    ]


def _is_continuation(text: str, prompt: str, raw: str, message: Mapping[str, Any], addition: str) -> bool:
    """True if `text` is the prompt, the whole reply in whatever form, and the addition."""
    if not (text.startswith(prompt) and text[len(prompt) :].endswith(addition)):
        return False
    reply = text[len(prompt) :].removesuffix(addition)
    return reply == raw or _contains(reply, message)


def _contains(text: str, message: Mapping[str, Any]) -> bool:
    """True if a rendering has the content of a message and the names of its calls, ignoring white space."""
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    parts = (str(message.get("content") or ""), *(str(call.get("name")) for call in calls))
    squeezed = "".join(text.split())
    return all("".join(part.split()) in squeezed for part in parts)


def _without_overlap(prompt: str, content: str) -> str:
    """The content without a prefix that the prompt already ends with, as in templates that open the thinking."""
    overlap = next(size for size in range(len(content), -1, -1) if prompt.endswith(content[:size]))
    return content[overlap:]


# -- Demonstrations ----------------------------------------------------------------------------------------------------


def render_demonstration(renderer: Renderer, messages: Messages, tools: Tools, ends: Sequence[int]) -> tuple[Turn, ...]:
    """The assistant's messages as turns: the prompts that `EpisodePolicy` would have sent, and the replies that the
    model would have sampled, each with the token that ends a turn (one of `ends`). If the template rewrites history,
    the demonstration forks into several rows. Replies of weight 0 are not trained on. Raises `TemplateError`."""
    turns: list[Turn] = []
    previous: PastReply | None = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tuple(messages[:place])
        prompt = None if previous is None else renderer.next_prompt(previous, before[len(previous.messages) + 1 :])
        if prompt is None:
            prompt = renderer.render(before, tools)
        reply = renderer.reply(before, message, tools, ends)
        none = (0.0,) * len(reply), (0,) * len(reply)  # log-probs and versions
        trained = bool(message.get("weight", 1))
        turns.append(Turn(prompt.ids, reply, *none, StopReason.EOS, images=prompt.images, trained=trained))
        previous = PastReply(before, tools, prompt.ids, reply, StopReason.EOS, message, prompt.images)
    return tuple(turns)
