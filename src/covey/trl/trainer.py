"""TRL's `GRPOTrainer`, whose arguments are translated into a Covey run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.app.build import make_collector, make_evaluator
from covey.app.models import make_engine
from covey.app.objects import prepare_objects, save_start_model
from covey.app.parts import open_rewards
from covey.app.prepare import Prepared
from covey.app.train import run_coroutine, run_to_end
from covey.errors import InputError
from covey.trl.config import GRPOConfig
from covey.trl.inputs import read_rows, translate_adapter, translate_rewards
from covey.trl.translate import translate
from covey.types import Task

if TYPE_CHECKING:
    from covey.training.run import Run

RewardFunction = Callable[..., Any] | str
NOT_SUPPORTED = {
    "reward_processing_classes": "a reward model's own tokenizer is used",
    "callbacks": "trainer.state.log_history has the figures of every step after train()",
    "optimizers": "AdamW is used; its settings are learning_rate, weight_decay, adam_beta1, adam_beta2",
    "quantization_config": "give a peft_config to train fewer weights",
    "tools": "covey train agent=hf agent.tools=[my_tools.py:lookup] (docs/agents.md)",
    "rollout_func": "an agent of your own: covey train agent=my_agent.py:function (docs/agents.md)",
    "environment_factory": "environments: docs/environments.md",
}


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclasses.dataclass
class TrainerState:
    global_step: int = 0  # optimiser steps
    max_steps: int = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # a dict per step and evaluation


class GRPOTrainer:
    """Train a language model with GRPO, like TRL's `GRPOTrainer`.

    `model` is a name, a folder or a loaded transformers model; a loaded one is written to output_dir first.
    `reward_funcs` are functions `f(completions, prompts, **columns) -> list[float | None]`, or names of a reward model
    or of one of Covey's rewards. `train_dataset` yields rows with a `prompt`. The arguments are checked here, before
    weights are loaded.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        _refuse(others, args, train_dataset)
        self.args = args or GRPOConfig(f"{_model_name(model).rpartition('/')[2]}-GRPO")
        self.state = TrainerState()
        self.run: Run | None = None
        only_prompts = bool(self.args.remove_unused_columns)
        train = read_rows(train_dataset, "train_dataset", only_prompts=only_prompts)
        held_out: tuple[Task, ...] = ()
        if eval_dataset is not None:
            validation = read_rows(eval_dataset, "eval_dataset", only_prompts=only_prompts)
            held_out = validation.tasks
            if validation.conversational != train.conversational:
                raise InputError("train_dataset and eval_dataset have prompts of different forms\n  use one form")
        self._translated = translate(self.args, len(train.tasks), len(held_out))
        adapter, remarks = translate_adapter(peft_config)
        rewards = translate_rewards(reward_funcs, self.args.reward_weights, conversational=train.conversational)
        for text in (*self._translated.remarks, *remarks):
            _warn(text)
        settings = self._translated.settings
        settings["model"] |= adapter
        settings["reward"] = {"weights": rewards.weights, "options": rewards.options}
        settings["resume"] = "disable"
        self._call: dict[str, Any] = {
            "model": self._folder_of(model, processing_class),
            "tasks": train.tasks,
            "validation": held_out or None,
            "reward": rewards.functions,
            "algorithm": self._translated.algorithm,
        }
        if not train.conversational:
            settings["agent"] = {"template": "none"}  # TRL applies no chat template to text prompts
        elif (own := getattr(processing_class, "chat_template", None)) is not None:
            settings["agent"] = {"template": str(self._write("chat_template.jinja", own))}
        self._prepared = self._prepare()
        self.processing_class = processing_class or self._own_tokenizer()
        self._check_tokenizer()

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end. `resume_from_checkpoint`: True continues the newest unfinished run with these settings; a
        path names the run to continue."""
        checkpoint = resume_from_checkpoint or self.args.resume_from_checkpoint
        resume = "auto" if checkpoint is True else str(checkpoint) if checkpoint else "disable"
        again = resume != "disable" or self.run is not None  # self._prepared can be used for one run only
        self.run = run_to_end(self._prepare(resume=resume) if again else self._prepared)
        done = self.run.learner.counters()["updates"]
        history = _history(self.run.path)
        self.state = TrainerState(done, self._translated.total_steps * self._translated.updates, history)
        losses = [row["loss/total"] for row in history if "loss/total" in row]
        metrics = {key: value for key, value in (history[-1] if history else {}).items() if key != "step"}
        return TrainOutput(done, sum(losses) / len(losses) if losses else float("nan"), metrics)

    @property
    def model(self) -> Any:
        """The trained transformers model; available after train()."""
        if self.run is None:
            raise InputError("the model is loaded by train()\n  call trainer.train() first")
        return self.run.learner.model  # type: ignore[attr-defined]  # of the learner in this process

    def evaluate(self) -> dict[str, float]:
        """Sample completions for eval_dataset with the model as it is, and score them. `eval_reward` is the weighted
        sum of all rewards, `eval_rewards/NAME/mean` each of them."""
        prepared = self._prepared
        if not prepared.tasks.validation:
            raise InputError("there is no eval_dataset to evaluate on\n  give one to GRPOTrainer")
        metrics: dict[str, float] = {}

        async def evaluate() -> None:
            metrics.update(await _evaluation(prepared, None if self.run is None else self.model))

        run_coroutine(evaluate())
        weights = prepared.rewards.weights
        rewards = {name: metrics[f"eval/sampled/{name}"] for name in weights if f"eval/sampled/{name}" in metrics}
        return {
            "eval_reward": sum(weights[name] * value for name, value in rewards.items()),
            **{f"eval_rewards/{name}/mean": value for name, value in rewards.items()},
            "eval_completions/mean_length": metrics["eval/sampled/length_mean"],
            "eval_completions/clipped_ratio": metrics["eval/sampled/truncated"],
        }

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """An ordinary model folder (with peft_config, an adapter folder) with its tokenizer."""
        folder = Path(output_dir or self.args.output_dir or "trainer_output")
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)

    def _prepare(self, **more: Any) -> Prepared:
        settings: dict[str, Any] = {}
        for section, values in (self._translated.settings | more).items():  # by key, since some sections are arguments
            by_key = {f"{section}.{key}": v for key, v in values.items()} if isinstance(values, dict) else {}
            settings |= by_key or {section: values}
        return prepare_objects(**self._call, **settings)

    def _folder_of(self, model: Any, tokenizer: Any) -> str:
        """The name of the model; a loaded model is saved to a folder."""
        if isinstance(model, (str, Path)):
            revision = (self.args.model_init_kwargs or {}).get("revision")
            return f"{model}@{revision}" if revision else str(model)
        if hasattr(model, "peft_config"):
            raise InputError("model has adapters already\n  give the plain model, and peft_config= for new adapters")
        return str(save_start_model(model, tokenizer, self._folder()))

    def _own_tokenizer(self) -> Any:
        """The model's own tokenizer: `_prepared` may have changed the template of its copy."""
        from covey.app.prepare import open_model

        return open_model(self._prepared.config).tokenizer

    def _check_tokenizer(self) -> None:
        assert self._prepared.model is not None
        expected = self._prepared.model.tokenizer.get_vocab()
        if self.processing_class.get_vocab() != expected:
            raise InputError(
                "processing_class has another vocabulary than the model's tokenizer\n"
                "  fix: AutoTokenizer.from_pretrained(MODEL), or give a loaded model whose embeddings fit"
            )

    def _folder(self) -> Path:
        return Path(self._translated.settings["logging"]["output_dir"])

    def _write(self, name: str, text: str) -> Path:
        path = self._folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path.resolve()


def _refuse(others: Mapping[str, Any], args: Any, train_dataset: Any) -> None:
    for name, value in others.items():
        if name not in NOT_SUPPORTED:
            raise TypeError(f"GRPOTrainer() got an unexpected keyword argument {name!r}")
        if value not in (None, [], (None, None)):
            raise InputError(f"GRPOTrainer({name}=...) is not supported by covey.trl\n  {NOT_SUPPORTED[name]}")
    if args is not None and not isinstance(args, GRPOConfig):
        raise InputError(
            f"args is a {type(args).__module__}.{type(args).__name__}\n"
            "  fix: from covey.trl import GRPOConfig, and use that one"
        )
    if train_dataset is None:
        raise InputError("train_dataset is missing\n  give a Dataset or a list of dicts with a `prompt`")


def _model_name(model: Any) -> str:
    return str(model) if isinstance(model, (str, Path)) else str(getattr(model.config, "_name_or_path", "model"))


def _history(path: Path) -> list[dict[str, Any]]:
    """The metrics of every step and evaluation."""
    lines = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return [{"step": line["step"], **line["metrics"]} for line in lines]


async def _evaluation(prepared: Prepared, policy: Any) -> Mapping[str, float]:
    from covey.models.loading import load_policy

    assert prepared.model is not None
    policy = load_policy(prepared.model, prepared.config.model) if policy is None else policy
    with ExitStack() as held:
        rewards = open_rewards(prepared.config, prepared.rewards, None, held)
        engine = make_engine(prepared, policy)
        held.callback(engine.close)
        await engine.publish(policy, version=0)
        evaluator = make_evaluator(prepared, make_collector(prepared, engine, rewards), _warn)
        return (await evaluator.run()).metrics


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
