"""The `reward_model` reward: the logit of a Hugging Face sequence classifier for one label.

    reward=reward_model reward.options.reward_model.model=ORG/NAME

The classifier reads the whole conversation in its own chat template or, without one, question and final answer as a
pair. Concurrent requests are batched. Batching changes the last bits of a score; `batch_size=1` is reproducible.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from covey.errors import Absent, InputError, unknown
from covey.images import has_images, plain_text
from covey.models.folder import (
    WeightsMismatch,
    check_buildable,
    check_weights_fit,
    load_weights,
    read_config,
    read_tokenizer,
)
from covey.models.hub import split_revision
from covey.replies import escape, special_tokens
from covey.rewards.function import inline, result_of
from covey.types import Episode

if TYPE_CHECKING:
    import torch

BATCH_WAIT = 0.005  # seconds that a batch waits for more requests
OPTION = "reward.options.reward_model"


@inline
@dataclass
@inline
class RewardModel:
    reward_name: ClassVar[str] = "reward_model"

    model: str  # a folder, or a Hugging Face id
    batch_size: int = 16  # maximum conversations per batch
    device: str = "cpu"  # cpu | cuda:1 ...; learner: the learner's device
    activation: str = "none"  # sigmoid: between 0 and 1
    label: int = 0  # which of the classifier's labels
    max_length: int | None = None  # keep the last N tokens; null: the classifier's limit

    _scorer: _Scorer | None = field(default=None, init=False)
    _batcher: _Batcher | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.model = str(self.model)
        if self.activation not in ("none", "sigmoid"):
            raise unknown(f"value of {OPTION}.activation", self.activation, ("none", "sigmoid"))
        if not self.batch_size >= 1:
            raise InputError(f"{OPTION}.batch_size must be at least 1, got {self.batch_size}")

    def verify(self) -> None:
        """Raise InputError unless the model exists, is a classifier and has the label."""
        with self._load_errors():
            config = read_config(self.model, self._path(), revision=self._revision())
        kinds = config.architectures or []
        if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
            kind = ", ".join(kinds) or "of an unknown architecture"
            raise InputError(f"{OPTION}.model={self.model} is not a sequence classifier, it is {kind}")
        if not 0 <= self.label < config.num_labels:
            raise InputError(f"{OPTION}.label={self.label}, but {self.model} has {config.num_labels} labels, from 0 on")
        from transformers import AutoModelForSequenceClassification as Classifier

        path = self._path()
        with self._load_errors():
            read_tokenizer(self.model, path, config, revision=self._revision())
            if Path(path).is_dir():
                check_weights_fit(Classifier, self.model, Path(path), config)
            else:
                check_buildable(Classifier, self.model, config)

    def open(self, *, seconds: float, device: str) -> None:
        with self._load_errors():
            self._scorer = _Scorer(
                self._path(),
                device if self.device == "learner" else self.device,
                self.label,
                self.max_length,
                self._revision(),
            )
        self._batcher = _Batcher(self._scorer.scores, self.batch_size)

    async def __call__(self, episode: Episode, question: str, final_answer: str) -> float:
        if self._batcher is None:
            raise RuntimeError("the reward model is not loaded: RewardSet.open does")
        messages = [dict(message) for message in episode.messages]
        for message in messages:
            if has_images(message.get("content")):
                message["content"] = plain_text(message["content"])
        request = Request(messages, question, final_answer)
        logit = await result_of(self._batcher.submit(request))
        return logit if self.activation == "none" else _sigmoid(logit)

    def close(self) -> None:
        if self._batcher is not None:
            self._batcher.close()
        self._batcher = self._scorer = None

    def _path(self) -> str:
        folder = Path(self.model).expanduser()
        return str(folder) if folder.is_dir() else split_revision(str(folder))[0]

    def _revision(self) -> str:
        """The revision in ORG/NAME@REVISION."""
        return split_revision(self.model)[1] or "main"

    @contextmanager
    def _load_errors(self) -> Iterator[None]:
        """Report errors of loading as mistakes in the option `model`."""
        try:
            yield
        except WeightsMismatch as error:
            if not error.missing_heads:
                raise
            lacks = f"its weights lack {error.missing_heads[0]}: it was not trained to classify"
            raise InputError(f"{OPTION}.model={self.model}: {lacks}") from error
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, Absent) else error
            if isinstance(error, InputError) and not isinstance(error, Absent):
                raise
            raise Absent(f"{OPTION}.model={self.model} cannot be loaded\n  {str(cause).splitlines()[0]}") from error


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))


@dataclass(frozen=True)
class Request:
    messages: list[dict[str, Any]]
    question: str
    final_answer: str


class _Scorer:
    """The classifier. Used by one thread."""

    def __init__(self, path: str, device: str, label: int, max_length: int | None, revision: str = "main") -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, revision=revision)
        self.special = special_tokens(self.tokenizer)
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        torch.backends.cuda.enable_cudnn_sdp(False)  # it keeps a plan for every shape: see memory.py
        self.model = load_weights(AutoModelForSequenceClassification, path, path, revision=revision, dtype=dtype)
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.label = label
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = min(n for n in (max_length, longest, self.tokenizer.model_max_length) if n is not None)

    def scores(self, requests: Sequence[Request]) -> list[float]:
        import torch

        batch = self.padded([self.encode(request) for request in requests])
        with torch.inference_mode():
            logits = self.model(**batch).logits
        return [float(logit) for logit in logits[:, self.label].float().cpu()]

    def encode(self, request: Request) -> dict[str, list[int]]:
        if self.tokenizer.chat_template is not None:
            messages = [
                {name: value if name == "role" else escape(value, self.special) for name, value in message.items()}
                for message in request.messages
            ]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            encoded = self.tokenizer(text, add_special_tokens=False)
            return {name: list(ids)[-self.max_length :] for name, ids in encoded.items()}
        texts = escape(request.question, self.special), escape(request.final_answer, self.special)
        pair = self.tokenizer(*texts, truncation=True, max_length=self.max_length)
        return {name: list(ids) for name, ids in pair.items()}

    def padded(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Pad on the right. Some classifiers read the last non-padding token, so without a padding token, one that
        occurs nowhere in the batch takes its place."""
        import torch

        pad = self.tokenizer.pad_token_id
        if pad is None:
            used = {token for row in rows for token in row["input_ids"]}
            pad = next(token for token in range(len(self.tokenizer)) if token not in used)
        self.model.config.get_text_config().pad_token_id = pad
        longest = max(len(row["input_ids"]) for row in rows)
        columns = {}
        for name in rows[0]:
            fill = pad if name == "input_ids" else 0
            filled = [row[name] + [fill] * (longest - len(row[name])) for row in rows]
            columns[name] = torch.tensor(filled, device=self.model.device)
        return columns


class _Batcher:
    """A thread that batches the requests of a few milliseconds."""

    def __init__(self, score: Callable[[Sequence[Any]], Sequence[float]], size: int) -> None:
        self.score = score
        self.size = size
        self.requests: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()  # None: stop
        self.thread = threading.Thread(target=self._run, name="covey-reward-model", daemon=True)
        self.thread.start()

    def submit(self, item: Any) -> Future[float]:
        future: Future[float] = Future()
        self.requests.put((item, future))
        return future

    def close(self) -> None:
        self.requests.put(None)
        self.thread.join()

    def _run(self) -> None:
        while batch := self._next():
            try:
                scores = self.score([item for item, _ in batch])
                for (_, future), value in zip(batch, scores, strict=True):
                    future.set_result(value)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)

    def _next(self) -> list[tuple[Any, Future[float]]]:
        """The next batch; empty after `close`."""
        batch: list[tuple[Any, Future[float]]] = []
        until = math.inf
        while len(batch) < self.size:
            try:
                one = self.requests.get(timeout=None if not batch else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if one is None:
                if batch:
                    self.requests.put(None)  # stop after this batch
                break
            until = min(until, time.monotonic() + BATCH_WAIT)
            batch.append(one)
        return batch
