"""The sizes of a model that decide its memory and its time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    source: str  # where it comes from
    known: bool = True  # false: guessed from the model's name

    @classmethod
    def of(cls, config: Any, source: str) -> Shape:
        """Of a transformers configuration."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            tied=text.tie_word_embeddings,
            source=source,
        )

    @property
    def body(self) -> int:
        """Entries of the matrices of all layers; norms and biases are thousands of times smaller."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def multiplied(self) -> int:
        """Entries that a token is multiplied with: an input matrix of its own is only looked up."""
        return self.body + self.output

    @property
    def parameters(self) -> int:
        return self.body + self.output * (1 if self.tied else 2)

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


# Billions of parameters → layers, hidden, intermediate, heads, key-value heads: sizes that are usual.
_USUAL = {
    0.14: (30, 576, 1536, 9, 3),
    0.5: (24, 896, 4864, 14, 2),
    1.5: (28, 1536, 8960, 12, 2),
    3.0: (36, 2048, 11008, 16, 2),
    7.0: (28, 3584, 18944, 28, 4),
    14.0: (48, 5120, 13824, 40, 8),
    32.0: (64, 5120, 27648, 40, 8),
    72.0: (80, 8192, 29568, 64, 8),
}


def shape_from_name(name: str) -> Shape | None:
    """The usual shape of the size that a name says (…-7B-…), for a model whose files are not here."""
    found = re.search(r"(?<![0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", name.lower())
    if found is None:
        return None
    billions = float(found[1]) / (1000 if found[2] == "m" else 1)
    size = min(_USUAL, key=lambda usual: abs(usual - billions) / billions)
    layers, hidden, intermediate, heads, kv_heads = _USUAL[size]
    return Shape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocabulary=151_936,
        tied=size <= 3,
        source=f"usual for {size:g}B, by the name {name}",
        known=False,
    )
