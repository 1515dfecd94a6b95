"""Lower bounds on the cost of a model shape, for any implementation.

    decode, one token of every answer   max((weights + Σ context · KV bytes) / bandwidth,  2 · weights · answers / rate)
    KV bytes of a token                 2 · layers · kv_heads · head_dim · bytes
    training FLOP of a token            6 · matrices + 12 · layers · d_q · context,   d_q = heads · head_dim

A token of a separate row of T tokens has T/2 tokens of context on average, so it costs 6 N + 6 · layers · d_q · T. The
prompt of a group is counted once; its tokens have no loss, so they skip the output matrix. Every answer reads its own
context when it is decoded; an engine that reads the prompt once per group may be faster than this bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a transformers configuration."""
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
        )

    @property
    def d_q(self) -> int:
        return self.heads * self.head_dim

    @property
    def body(self) -> int:
        """Entries of the matrices of all layers. Norms and biases are thousands of times smaller."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Weights that a forward pass multiplies with. A tied input matrix is the output matrix; an untied one is only
        looked up."""
        return self.body + self.output

    @property
    def parameters(self) -> int:
        return self.body + self.output * (1 if self.tied else 2)

    def kv_bytes(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Rates:
    """The limits of a machine."""

    bandwidth: float  # bytes of memory read per second
    flops: float  # of matrix products, per second
    source: str  # where the two numbers come from


@dataclass(frozen=True)
class Load:
    """A number of prompts, each with a group of answers; all prompts have one length, and all answers have one."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def answers(self) -> int:
        return self.prompts * self.group

    @property
    def sampled(self) -> int:
        return self.answers * self.answer_tokens


def decode_seconds(shape: Shape, rates: Rates, itemsize: int, prompt_tokens: int, answers: Sequence[int]) -> float:
    """Seconds to decode answers of these lengths concurrently. The first token of each comes from the prefill."""
    weight_bytes, kv_bytes = shape.weights * itemsize, shape.kv_bytes(itemsize)
    lengths = sorted(answers)
    seconds, done = 0.0, 0
    for token in range(1, lengths[-1] if lengths else 0):
        while lengths[done] <= token:
            done += 1
        alive = len(lengths) - done
        moved = weight_bytes + alive * (prompt_tokens + token) * kv_bytes
        seconds += max(moved / rates.bandwidth, 2 * shape.weights * alive / rates.flops)
    return seconds


@dataclass(frozen=True)
class Request:
    """Answers to one prompt after tokens that are cached already."""

    cached: int
    prompt_tokens: int
    answers: Sequence[int]

    @property
    def context(self) -> float:
        """Σ context of the answers' tokens that are computed: all but the last of each."""
        return sum(_context(self.cached + self.prompt_tokens, tokens - 1) for tokens in self.answers)

    @property
    def computed(self) -> int:
        return sum(self.answers) - len(self.answers)


def sampling_flops(shape: Shape, requests: Sequence[Request]) -> float:
    """FLOP of the forward passes over prompts, each once, and answers. Of a prompt only the last token goes through the
    output matrix."""
    total = 0.0
    for request in requests:
        context = _context(request.cached, request.prompt_tokens) + request.context
        total += 2 * shape.body * (request.prompt_tokens + request.computed) + 2 * shape.output * (1 + request.computed)
        total += 4 * shape.layers * shape.d_q * context
    return total


def queue_seconds(shape: Shape, rates: Rates, itemsize: int, requests: Sequence[Request], rows: int) -> float:
    """Lower bound for requests of which at most `rows` answers are decoded together: all FLOP at full rate, or all
    memory that is read. A decode step reads the weights once, and each token its context."""
    longest = max(max(request.answers) for request in requests) - 1
    steps = max(-(-sum(request.computed for request in requests) // rows), longest)
    context = sum(request.context for request in requests)
    moved = steps * shape.weights * itemsize + context * shape.kv_bytes(itemsize)
    return max(moved / rates.bandwidth, sampling_flops(shape, requests) / rates.flops)


def prefill_seconds(shape: Shape, rates: Rates, load: Load) -> float:
    """Seconds of one forward pass over every prompt; only its last token goes through the output matrix."""
    tokens = load.prompts * load.prompt_tokens
    attention = 4 * shape.layers * shape.d_q * load.prompts * _context(0, load.prompt_tokens)
    return (2 * shape.body * tokens + 2 * shape.output * load.prompts + attention) / rates.flops


def sampling_seconds(shape: Shape, rates: Rates, itemsize: int, load: Load) -> float:
    lengths = [load.answer_tokens] * load.answers
    decode = decode_seconds(shape, rates, itemsize, load.prompt_tokens, lengths)
    return prefill_seconds(shape, rates, load) + decode


def learning_seconds(shape: Shape, rates: Rates, load: Load) -> float:
    """Seconds of forward and backward. An answer's last token predicts no other token and is not computed."""
    return training_flops(shape, load) / rates.flops


def training_flops(shape: Shape, load: Load) -> float:
    inner = load.answer_tokens - 1
    tokens = load.prompts * load.prompt_tokens + load.answers * inner
    context = load.prompts * _context(0, load.prompt_tokens) + load.answers * _context(load.prompt_tokens, inner)
    return 6 * shape.body * tokens + 6 * shape.output * load.sampled + 12 * shape.layers * shape.d_q * context


def _context(before: int, tokens: int) -> float:
    """Σ context of `tokens` tokens after `before` others; within the row T/2 per token on average."""
    return tokens * before + tokens * tokens / 2
