"""covey.Trainer and covey.train: training from Python.

trainer = covey.Trainer(model="smollm2-135m", tasks=rows, reward=exact, algorithm=covey.Gvpo(beta=0.01))
for step in trainer:                   # break, inspect, change, continue
    print(step.index, step.metrics["reward/mean"])
trainer.model.save_pretrained("out")
"""

from __future__ import annotations

import dataclasses
import tempfile
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from covey.app.build import build
from covey.app.objects import prepare_objects
from covey.app.train import print_note, report_end, resume_hint_on_failure, run_to_end
from covey.errors import InputError
from covey.ranges import check_ranges
from covey.tasks import TaskSet, with_system_prompt
from covey.types import Messages, Sampling, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from covey.algorithms import Algorithm
    from covey.app.objects import AgentLike, AlgorithmLike, ModelLike, RewardLike, TasksLike, ToolLike
    from covey.config.schema import Config
    from covey.protocols import Metrics
    from covey.training.driver import Driver
    from covey.training.record import Step
    from covey.training.run import Run

Result = TypeVar("Result")


class Trainer:
    """A training run as an object: `for step in trainer`, `trainer.step()`, `trainer.evaluate()`, `trainer.model`.

    `model` is a name, a folder or a loaded transformers model (which is copied, not changed). `tasks` is the name of a
    data set or generated task, a file, or rows: a list of dicts or Tasks, a Hugging Face Dataset, anything that yields
    dicts with `question` and `answer`; `validation` takes the same. `reward` is a function, a name, or a list of them;
    `algorithm` a name, an object such as `covey.Gvpo(beta=0.01)`, or your own class or object. `agent` is a name, a
    coroutine, an environment's class or an Agent; `tools` are functions or names. `callbacks` are described in
    `covey.training.callbacks`. Settings are given by section, `learner={"lr": 2e-5}`, or by key, `**{"learner.lr":
    2e-5}`.

    The arguments are checked here. Weights are loaded when they are first needed.
    """

    def __init__(
        self,
        model: ModelLike | None = None,
        tasks: TasksLike | None = None,
        reward: RewardLike | None = None,
        algorithm: AlgorithmLike | None = None,
        *,
        validation: TasksLike | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        agent: AgentLike | None = None,
        tools: Sequence[ToolLike] = (),
        callbacks: Sequence[Any] = (),
        recipe: str | None = None,
        **settings: Any,
    ) -> None:
        from covey.training.callbacks import Callbacks

        self._run: Run | None = None
        self._driver: Driver | None = None
        self._finalizer: weakref.finalize[..., Trainer] | None = None
        self._callbacks = Callbacks(callbacks, owner=weakref.ref(self))
        self._prepared = prepare_objects(
            model,
            tasks,
            reward,
            algorithm,
            validation=validation,
            tokenizer=tokenizer,
            agent=agent,
            tools=tools,
            recipe=recipe,
            **settings,
        )

    # -- steps -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """All remaining steps. After a break, another loop continues with the next step."""
        while (step := self.step()) is not None:
            yield step

    def step(self) -> Step | None:
        """One training step, with the evaluation and checkpoint that are due; None if no step is left.

        Ctrl-C raises KeyboardInterrupt, and the trainer stays usable: the next call repeats the interrupted step. Its
        sampling or evaluation starts again; an update that had started is finished first."""
        run = self.run
        driver = self._active_driver()
        if driver.in_callback:
            raise InputError("step() cannot be called in a callback, which is part of a step")
        step = self._call(run.step)
        if run.over:
            self._call(run.conclude)
        return step

    def train(self) -> Run:
        """All remaining steps."""
        if self._run is None:
            run_to_end(self._prepared, drive=self._all_steps)
        else:
            self._all_steps(self._run)
            report_end(self._run)
        return self.run

    def _all_steps(self, run: Run) -> None:
        if run is not self._run:
            self._start(run)
        while self.step() is not None:
            pass

    def stop(self) -> None:
        """End the run after the step in progress, with its last evaluation and checkpoint. For callbacks, and between
        two steps."""
        self.run.stop()

    def evaluate(self) -> Metrics:
        """Evaluate the current weights on the validation tasks; recorded in metrics.jsonl."""
        if self.run.evaluator is None:
            raise InputError("there is nothing to evaluate on\n  give Trainer(validation=...)")
        return self._call(self.run.evaluate)

    def save(self) -> Path:
        """Write a checkpoint and return its folder; its `model` is an ordinary model folder."""
        self.run.check_savable()
        return self._call(self.run.save).folder

    def generate(self, question: str | Messages, *, temperature: float = 0.0, max_tokens: int | None = None) -> str:
        """Answer a question with the run's agent and the current weights. The prompt is built as in training."""
        if isinstance(question, Mapping):
            raise InputError("generate() got one message\n  give a question, or a list of messages: [message]")
        messages = ({"role": "user", "content": question},) if isinstance(question, str) else tuple(question)
        tasks = TaskSet((Task("ask", messages),), (), None, "")
        (task,) = with_system_prompt(tasks, self.config.data.system_prompt).train
        rollout = self.config.rollout
        sampling = Sampling(temperature, max_tokens=max_tokens or rollout.max_tokens, stop=tuple(rollout.stop))
        episode = self._call(lambda: self.run.answer(task, sampling))
        if episode.failure is not None:
            raise InputError(f"no answer could be sampled ({episode.failure.cause}): {episode.failure.message}")
        return episode.final_answer

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run of this trainer. The first use loads the weights and creates its folder."""
        if self._run is None:
            self._start(build(self._prepared, note=print_note))
        assert self._run is not None
        return self._run

    @property
    def model(self) -> PreTrainedModel:
        """The current transformers model, with its adapters if it has any."""
        if (model := getattr(self.run.learner, "model", None)) is None:
            raise InputError("the model is in other processes (cluster=ray)\n  load trainer.save() / 'model'")
        return model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.run.tokenizer

    @property
    def config(self) -> Config:
        return self._prepared.config

    @property
    def algorithm(self) -> Algorithm:
        return self._prepared.algorithm

    @property
    def callbacks(self) -> list[Any]:
        """May be changed between steps."""
        return self._callbacks.callbacks

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.run.path

    @property
    def steps_done(self) -> int:
        return 0 if self._run is None else self._run.done

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step so far, with its index as "step"."""
        return [] if self._run is None else self._run.metrics

    @property
    def evaluations(self) -> list[tuple[int, Metrics]]:
        """Every evaluation of this trainer: (steps done, metrics)."""
        return [] if self._run is None else self._run.evaluations

    @property
    def lr(self) -> float:
        """The base learning rate of the schedule. It may be changed between steps; a resumed run starts with that of
        its settings."""
        optimizer = getattr(self.run.learner, "optimizer", None)
        return self.config.learner.lr if optimizer is None else float(optimizer.config.lr)

    @lr.setter
    def lr(self, value: float) -> None:
        optimizer = getattr(self.run.learner, "optimizer", None)
        if optimizer is None:
            raise InputError("the learning rate of learners in other processes (cluster=ray) cannot be changed")
        changed = dataclasses.replace(optimizer.config, lr=value)
        check_ranges(changed, "learner.")
        optimizer.config = changed

    # -- results ---------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the current model and tokenizer as an ordinary model folder (with LoRA, an adapter folder)."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        source = self._prepared.model
        if source is not None and source.vision is not None:
            source.vision.save_pretrained(folder)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, commit_message: str | None = None
    ) -> str:
        """Upload the current model and tokenizer (with LoRA, the adapter) with a model card to the Hugging Face hub.
        Returns the address. `covey push` merges an adapter, and writes the files without uploading them."""
        from covey.app.push import check_repo, upload, write_card

        check_repo(repo_id)
        with tempfile.TemporaryDirectory(prefix="covey-push-") as scratch:
            folder = Path(scratch)
            self.save_pretrained(folder)
            write_card(self.path, folder, repo_id, step=self.steps_done)
            return upload(folder, repo_id, private=private, token=token, message=commit_message)

    def plot(self) -> Any:
        """The learning curve: a matplotlib Figure, which a notebook shows."""
        return self.run.plot()

    def __repr__(self) -> str:
        if self._run is None:
            names = f"{self.config.algorithm.name} trains {self.config.model.name} on {self._prepared.task_name}"
            return f"Trainer({names}, not started)"
        return f"Trainer{repr(self._run).removeprefix('Run')}"

    def _repr_html_(self) -> str | None:
        return None if self._run is None else self._run._repr_html_()

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run: close its engine and processes and unlock its folder. The model, the metrics and the path stay
        available. If steps are left, its status is `interrupted`. Also called on garbage collection and at exit."""
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._driver is not None:
            self._driver.close(error)

    def _start(self, run: Run) -> None:
        from covey.training.driver import Driver

        run.callbacks = self._callbacks
        if self._finalizer is not None:
            self._finalizer.detach()
        self._run, self._driver = run, Driver(run)
        self._finalizer = weakref.finalize(self, Driver.close, self._driver)

    def _active_driver(self) -> Driver:
        assert self._run is not None and self._driver is not None, "`run` starts it"
        return self._driver

    def _call(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        run = self.run
        with resume_hint_on_failure(run.path, run.config.resume, interrupted=False):
            return self._active_driver().call(work)


def train(
    model: ModelLike | None = None,
    tasks: TasksLike | None = None,
    reward: RewardLike | None = None,
    algorithm: AlgorithmLike | None = None,
    *,
    validation: TasksLike | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    agent: AgentLike | None = None,
    tools: Sequence[ToolLike] = (),
    callbacks: Sequence[Any] = (),
    recipe: str | None = None,
    **settings: Any,
) -> Run:
    """Train to the end and return the run: its folder (`run.path`), its evaluations, its learner with the trained
    model. The arguments are those of `covey.Trainer`."""
    with Trainer(
        model,
        tasks,
        reward,
        algorithm,
        validation=validation,
        tokenizer=tokenizer,
        agent=agent,
        tools=tools,
        callbacks=callbacks,
        recipe=recipe,
        **settings,
    ) as trainer:
        try:
            return trainer.train()
        except KeyboardInterrupt:
            if trainer._run is not None:
                with resume_hint_on_failure(trainer.path, trainer.config.resume):
                    raise
            raise
