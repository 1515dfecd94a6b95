"""Runs that start from other runs: extended, continued with other settings, branched off a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import covey
from covey.app.objects import prepare_objects
from covey.app.resume import _adapted
from covey.cli.main import main
from covey.config.validate import Change
from covey.errors import RunFailed
from covey.storage import sha256
from covey.telemetry import evaluation_files, read_evaluation
from covey.telemetry.key_metrics import is_machine_dependent
from covey.training.checkpoint import Checkpoint

REWARD = """
from covey.rewards.function import inline
@inline
def variety(final_answer):
    return len(set(final_answer)) / 10
"""
SMALL: dict[str, Any] = {
    **{"data.val_size": 4, "data.train_batch_size": 2, "rollout.group_size": 4, "rollout.max_tokens": 6},
    **{"learner.lr": 1e-3, "eval.every": 2, "loop.save_every": 2, "loop.keep_last": 9, "loop.threads": 1},
    **{"logging.to": [], "data.train_size": 16},
}
WORDS = ["reward=reward.py:variety", *(f"{key}={value}" for key, value in SMALL.items())]


def train(*words: str) -> int:
    return main(["train", *WORDS, *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """outputs/short has made two steps, outputs/long four; each has a checkpoint every two."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("reward.py").write_text(REWARD)
        for name, steps in (("short", 2), ("long", 4)):
            assert train(f"model={tiny_model_folder}", f"loop.total_steps={steps}", f"logging.output_dir={name}") == 0
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(REWARD)


def copy(trained: Path, name: str) -> Path:
    """A run of the fixture, as if it had been made here."""
    (run,) = (path.parent for path in (trained / name).glob("*/*/run.json"))
    target = Path("outputs/2026-01-01") / name
    shutil.copytree(run, target)
    for file in (target / "config.yaml", *target.glob("checkpoints/*/config.yaml")):
        file.write_text(file.read_text().replace(f"output_dir: {name}", "output_dir: outputs"))
    for folder in target.glob("checkpoints/*"):  # its manifest has the hash of the settings
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["config.yaml"] = sha256(folder / "config.yaml")
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return target


def interrupted(trained: Path) -> Path:
    """The longer run, killed after its third step."""
    run = copy(trained, "long")
    shutil.rmtree(run / "checkpoints/step-000004")
    (run / "run.json").write_text(json.dumps(info(run) | {"status": "interrupted"}))
    return run


def runs() -> list[Path]:
    return sorted(path.parent for path in Path("outputs").glob("*/*/run.json"))


def info(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def settings(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return found


def file_of(run: Path, step: int, name: str = "model/model.safetensors") -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / name).read_bytes()


def state(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file_of(run, step, "state.json"))
    return found


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without timings and memory."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in found:
        record["metrics"] = {k: v for k, v in record["metrics"].items() if not is_machine_dependent(k)}
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_course(run: Path, other: Path) -> None:
    """The same weights, moments, metrics and episodes."""
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        assert file_of(run, 4, name) == file_of(other, 4, name)
    assert records(run) == records(other)
    assert (run / "episodes.jsonl").read_bytes() == (other / "episodes.jsonl").read_bytes()


class Loaded(Exception):
    """The run would have started."""


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **named: Any) -> None:
        raise Loaded

    monkeypatch.setattr("covey.app.models._load_models", stop)


def other_model(folder: Path) -> Path:
    """The same with wider layers."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained("wider")
    AutoTokenizer.from_pretrained(folder).save_pretrained("wider")
    return Path("wider").absolute()


# --- a run is a model --------------------------------------------------------------------------------------------


def test_a_run_is_the_model_that_another_one_starts_from(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """model=RUN takes the best checkpoint, as covey eval does; model=CHECKPOINT that one."""
    run = copy(trained, "long")
    best = run / "checkpoints" / f"step-{state(run, 4)['best']['step']:06d}" / "model"
    assert train(f"model={run}", "--dry-run") == 0
    assert f"model      {best}\n" in capsys.readouterr().out
    assert prepare_objects(str(run), "sort").config.model.name == str(best)
    assert train(f"model={run}/checkpoints/step-2", "loop.total_steps=1", "learner.lr=0") == 0
    started = runs()[-1]
    assert file_of(started, 1) == file_of(run, 2) != file_of(run, 4)
    folder = str(run / "checkpoints/step-000002/model")
    assert (info(started)["model"], settings(started)["model"]["name"]) == (folder, folder)


def test_a_run_without_a_checkpoint_is_no_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(trained, "short")
    shutil.rmtree(run / "checkpoints")
    assert train(f"model={run}") == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


# --- a run goes on in its folder, with other settings ------------------------------------------------------------


def test_an_extended_run_ends_like_one_that_was_longer_from_the_start(
    trained: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, longer = copy(trained, "short"), copy(trained, "long")
    before = info(run)
    assert train(f"model={tiny_model_folder}", "loop.total_steps=4", f"resume={run}") == 0
    told = capsys.readouterr().err
    assert f"{run} continues after step 2 with other settings:\n  loop.total_steps: 2 → 4\n" in told
    assert "warning" not in told
    assert_same_course(run, longer)
    now = info(run)
    assert (now["status"], now["total_steps"]) == ("finished", 4)
    assert now["fingerprint"] == info(longer)["fingerprint"] != before["fingerprint"]
    for key in ("number", "started", "command", "versions"):
        assert now[key] == before[key]
    assert now["changes"] == [{"step": 2, "settings": {"loop.total_steps": [2, 4]}}]
    assert "changes" not in info(longer)
    assert (settings(run)["loop"]["total_steps"], settings(run)["resume"]) == (4, "auto")
    assert "4 of 4 steps" in (run / "summary.md").read_text()


def test_only_what_is_named_differs(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """covey train resume=RUN brings the run's own settings; keys of its algorithm are known."""
    run = copy(trained, "short")
    before = info(run)
    assert main(["train", f"resume={run}"]) == 0
    assert capsys.readouterr().err == f"all 2 steps of {run} are done; loop.total_steps=MORE continues the run\n"
    assert info(run) == before
    assert main(["train", f"resume={run}", "loop.total_steps=3", "algorithm=grpo"]) == 0
    told = capsys.readouterr().err
    assert told.index("  loop.total_steps: 2 → 3\n") < told.index("warning: ") < told.index("algorithm.name: gvpo → ")
    assert info(run)["algorithm"] == "grpo"
    assert main(["train", f"resume={run}", "loop.total_steps=4", "algorithm.clip_ratio_low=0.1"]) == 0
    assert "  algorithm.clip_low: 0.2 → 0.1\n" in capsys.readouterr().err
    assert [change["step"] for change in info(run)["changes"]] == [2, 3]
    assert [record["step"] for record in records(run) if record["kind"] == "step"] == [0, 1, 2, 3]


def test_an_unfinished_run_that_is_named_goes_on_bit_by_bit(trained: Path) -> None:
    run = interrupted(trained)
    assert main(["train", f"resume={run}"]) == 0
    (trained_run,) = (path.parent for path in (trained / "long").glob("*/*/run.json"))
    assert_same_course(run, trained_run)


def test_the_learning_rate_follows_the_schedule_of_the_longer_run(trained: Path) -> None:
    run = copy(trained, "short")
    words = ["loop.total_steps=4", "learner.schedule=linear", "learner.lr=2e-3", "eval.every=0", "eval.after=false"]
    assert main(["train", f"resume={run}", *words]) == 0
    rates = [record["metrics"]["optim/lr"] for record in records(run) if record["kind"] == "step"]
    # Constant at first; then 2e-3 that falls to 0 in four updates, of which the last two are made.
    assert rates == pytest.approx([1e-3, 1e-3, 2e-3 * (1 - 2 / 4), 2e-3 * (1 - 3 / 4)])


IMPOSSIBLE = {
    "steps that are made": (["loop.total_steps=1"], "2 steps are done, more than loop.total_steps=1"),
    "a new adapter": (["model.lora.rank=4"], "model.lora.rank: 0 → 4"),
    "a critic": (["algorithm=ppo"], "algorithm.name: gvpo → ppo"),
    "another precision": (["model.dtype=bfloat16"], "model.dtype: auto → bfloat16"),
    "another model": (["model=wider"], "intermediate_size is"),
}


@pytest.mark.usefixtures("nothing_loads")
def test_what_does_not_fit_the_checkpoint_is_refused_before_the_model_loads(
    trained: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    run = copy(trained, "short")
    before = contents(run)
    other_model(tiny_model_folder)
    capsys.readouterr()
    for words, message in IMPOSSIBLE.values():
        for check in ([], ["--validate-only"]):
            assert main(["train", f"resume={run}", "loop.total_steps=9", *words, *check]) == 2
            err = capsys.readouterr().err
            assert message in err and err.endswith("nothing was started\n")
            assert ("model.name: " in err) == (words == ["model=wider"])
    assert contents(run) == before
    assert runs() == [run]


def test_an_adapter_keeps_its_shape(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    assert train(f"model={tiny_model_folder}", "model.lora.rank=4", "loop.total_steps=1", "eval.before=false") == 0
    (run,) = runs()
    for word in ("model.lora.rank=8", "model.lora.alpha=8", "model.lora.target_modules=[q_proj]", "model.lora.rank=0"):
        assert main(["train", f"resume={run}", "loop.total_steps=2", word]) == 2
        assert f"  {word.partition('=')[0]}: " in capsys.readouterr().err
    assert main(["train", f"resume={run}", "loop.total_steps=2", "algorithm=grpo", "algorithm.kl_coef=0.1"]) == 0
    assert (run / "checkpoints/step-000002/model/adapter_config.json").is_file()


def test_other_tasks_and_rewards_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no setting says so: a file was edited."""
    run = copy(trained, "short")
    Path("train.jsonl").write_text('{"question": "c", "answer": "d"}\n')
    Path("val.jsonl").write_text('{"question": "e", "answer": "f"}\n')
    words = ["data.train_files=train.jsonl", "data.val_files=val.jsonl", "loop.total_steps=4"]
    assert main(["train", f"resume={run}", *words]) == 0
    told = capsys.readouterr().err.splitlines()
    warning = next(at for at, line in enumerate(told) if "warning: these change training" in line)
    assert "  data.train_files: null → train.jsonl" in told[warning:]
    assert "  training tasks: changed" in told[warning:]
    assert "  validation tasks: changed" in told[:warning]
    assert not any("rewards" in line for line in told)
    # Scores on other tasks are not compared: the first evaluation on these is the best so far.
    assert state(run, 2)["best"]["step"] == 2 and state(run, 4)["best"]["step"] == 4
    Path("val.jsonl").write_text('{"question": "g", "answer": "h"}\n')
    Path("reward.py").write_text(REWARD.replace("10", "20"))
    assert main(["train", f"resume={run}", "loop.total_steps=5", "--validate-only"]) == 0
    out = capsys.readouterr().out
    assert "  validation tasks: changed" in out and "  rewards: changed" in out and "  training tasks: " not in out


def test_an_extension_that_ends_before_its_first_checkpoint(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checkpoint was trained with counts, not what run.json says since."""
    run = copy(trained, "short")

    async def fail(*given: Any) -> None:
        raise RunFailed("the power went")

    with monkeypatch.context() as patch:
        patch.setattr("covey.training.run.update", fail)
        assert main(["train", f"resume={run}", "loop.total_steps=6", "data.train_batch_size=3"]) == 1
    (recorded,) = info(run)["changes"]
    assert recorded["settings"]["data.train_batch_size"] == [2, 3]
    words = ["loop.total_steps=4", "data.train_batch_size=2"]
    assert main(["train", f"resume={run}", *words]) == 0
    assert info(run)["changes"] == [{"step": 2, "settings": {"loop.total_steps": [2, 4]}}]
    assert_same_course(run, copy(trained, "long"))


def test_synchronous_and_asynchronous_runs_continue_each_other(trained: Path) -> None:
    run = copy(trained, "short")
    for steps, mode in ((3, "async"), (4, "sync")):
        words = [f"loop.total_steps={steps}", f"mode={mode}", "eval.after=false", "eval.every=0"]
        assert main(["train", f"resume={run}", *words]) == 0
    assert [record["step"] for record in records(run) if record["kind"] == "step"] == [0, 1, 2, 3]


def test_what_an_algorithm_remembers(tiny_model_folder: Path, tmp_path: Path) -> None:
    """It goes on, unless the algorithm or the rewards changed; a KL coefficient that is asked for is taken."""
    words = {"rollout.max_tokens": 4, "data.train_size": 4, "algorithm.kl_coef": 0.1, "algorithm.kl_target": 0.01}
    prepared = prepare_objects(str(tiny_model_folder), "sort", "exact", "dgdo", **words)
    saved = {"estimator": {"step": 7, "weights": {"exact": 1.0}}, "kl": {"coef": 0.25}}
    checkpoint = Checkpoint(tmp_path, {"algorithm": saved, "best": {"step": 1, "value": 0.5}, "source": {"window": {}}})

    def kept(*keys: str) -> dict[str, Any]:
        return _adapted(prepared, checkpoint, [Change(key, 0, 1) for key in keys]).state

    assert kept() == checkpoint.state
    assert kept("loop.total_steps") == checkpoint.state
    assert kept("algorithm.beta") == checkpoint.state | {"source": {}}
    assert kept("algorithm.kl_coef")["algorithm"] == saved | {"kl": {"coef": 0.1}}
    assert kept("rewards")["algorithm"] == {"estimator": {"step": 0, "weights": {}}, "kl": {"coef": 0.1}}
    assert kept("eval.n")["best"] == {"step": 1, "value": None}


def test_demonstrations_too(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"q {i}", "answer": str(i)} for i in range(6)]
    Path("demos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"model={tiny_model_folder}", "data.train_files=demos.jsonl", "data.train_batch_size=2", "loop.threads=1"]
    assert main(["sft", *words, "loop.total_steps=4", "loop.save_every=2", "logging.experiment=longer"]) == 0
    assert main(["sft", *words, "loop.total_steps=2"]) == 0
    longer, run = sorted(runs(), key=lambda run: info(run)["number"])
    assert main(["sft", f"resume={run}", "loop.total_steps=4"]) == 0
    assert "  loop.total_steps: 2 → 4\n" in capsys.readouterr().err
    assert main(["sft", f"resume={longer}/checkpoints/step-2"]) == 0
    branch = max(runs(), key=lambda run: info(run)["number"])
    for other in (run, branch):
        assert file_of(other, 4) == file_of(longer, 4)
        assert records(other) == records(longer)
    assert main(["train", f"resume={run}"]) == 2
    assert f"a run of covey sft\n  start from its weights:  model={run}" in capsys.readouterr().err
    assert train(f"model={run}", "--dry-run") == 0
    assert f"model      {run}/checkpoints/step-000004/model\n" in capsys.readouterr().out


def test_from_python(trained: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(trained, "short")

    def go(resume: Path) -> Path:
        more = {"loop.total_steps": 4}
        return covey.train(str(tiny_model_folder), "sort", "reward.py:variety", **SMALL, **more, resume=resume).path

    assert go(run) == run
    assert "  loop.total_steps: 2 → 4\n" in capsys.readouterr().err
    assert_same_course(run, copy(trained, "long"))
    branch = go(run / "checkpoints/step-000002")
    assert info(branch)["parent"] == {"run": str(run.resolve()), "step": 2}


# --- a new run begins at a checkpoint ----------------------------------------------------------------------------


def test_a_run_begins_at_any_checkpoint_of_another(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(trained, "long")
    before = contents(run)
    assert main(["train", f"resume={run}/checkpoints/step-2"]) == 0
    branch = runs()[-1]
    assert capsys.readouterr().err == f"{branch} starts after step 2 of {run}\n"
    assert contents(run) == before
    assert_same_course(branch, run)  # with the same settings; the first two steps are copied
    about = info(branch)
    assert about["parent"] == {"run": str(run.resolve()), "step": 2}
    assert (about["status"], about["number"]) == ("finished", info(run)["number"] + 1)
    assert str(branch) in about["command"]
    assert settings(branch) == settings(run)


def test_a_branch_has_settings_of_its_own_and_goes_on_itself(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(trained, "long")
    command = ["train", f"resume={run}/checkpoints/step-000002", "rollout.temperature=0.9"]
    assert main([*command, "loop.max_minutes=0"]) == 0
    assert "rollout.temperature: 1.0 → 0.9" in capsys.readouterr().err
    (_, branch) = runs()
    assert info(branch)["status"] == "interrupted"
    assert main([*command, "loop.max_minutes=null"]) == 0  # the same command goes on in the branch
    assert runs() == [run, branch]
    assert info(branch)["status"] == "finished"
    assert [record["step"] for record in records(branch) if record["kind"] == "step"] == [0, 1, 2, 3]
    assert records(branch)[:4] == records(run)[:4]
    assert records(branch)[4:] != records(run)[4:]


def test_answers_of_evaluations_are_kept_up_to_the_checkpoint(trained: Path) -> None:
    run = interrupted(trained)
    assert list(evaluation_files(run)) == [0, 2, 4]  # the last one was made after the checkpoint that is left
    before = run.joinpath("evaluations/step-000004.json").read_bytes()
    means = {record["step"]: record["metrics"] for record in records(run) if record["kind"] == "eval"}
    for step, path in evaluation_files(run).items():
        answers = read_evaluation(path)["modes"]["greedy"]
        assert len(set(answers["task"])) == len(answers["task"]) == 4
        assert sum(answers["rewards"]["variety"]) / 4 == pytest.approx(means[step]["eval/greedy/variety"])
        assert sum(answers["tokens"]) / 4 == means[step]["eval/greedy/length_mean"]
        assert answers["failure"] == [None] * 4
    assert main(["train", f"resume={run}/checkpoints/step-000002", "loop.max_minutes=0"]) == 0
    assert list(evaluation_files(runs()[-1])) == [0, 2]  # a branch has those up to its start
    assert main(["train", f"resume={run}", "loop.max_minutes=0"]) == 0
    assert list(evaluation_files(run)) == [0, 2]
    assert main(["train", f"resume={run}", "loop.max_minutes=null"]) == 0
    assert run.joinpath("evaluations/step-000004.json").read_bytes() == before


def test_a_branch_that_cannot_begin_leaves_nothing(
    trained: Path, capsys: pytest.CaptureFixture[str], nothing_loads: None
) -> None:
    run = copy(trained, "long")
    there = sorted(Path("outputs").rglob("*"))
    assert main(["train", f"resume={run}/checkpoints/step-3"]) == 2
    assert "no such checkpoint\n  that run has: step-000002, step-000004" in capsys.readouterr().err
    with pytest.raises(Loaded):
        main(["train", f"resume={run}/checkpoints/step-000002"])
    (run / "metrics.jsonl").write_text("")
    assert main(["train", f"resume={run}/checkpoints/step-000002"]) == 2
    assert "metrics.jsonl: 0 bytes" in capsys.readouterr().err
    assert sorted(Path("outputs").rglob("*")) == there


def test_a_sweep_branches_off_a_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy(trained, "long")
    sweep = ["train", "loop.total_steps=3", "--multirun", "learner.lr=1e-3,2e-3", "eval.after=false"]
    assert main([*sweep, f"resume={run}"]) == 2
    assert f"resume={run}/checkpoints/step-" in capsys.readouterr().err
    assert main([*sweep, f"resume={run}/checkpoints/step-2"]) == 0
    found = [path.parent for path in sorted(Path("multirun").glob("*/*/*/run.json"))]
    assert [info(job)["parent"]["step"] for job in found] == [2, 2]
    assert file_of(found[0], 3) != file_of(found[1], 3)


# --- resume=auto -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_loads")
def test_an_unfinished_near_match_is_named(
    trained: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = interrupted(trained), [f"model={tiny_model_folder}", "loop.total_steps=4"]

    def told(*more: str) -> list[str]:
        with pytest.raises(Loaded):
            train(*words, *more)
        return capsys.readouterr().err.splitlines()

    assert told("learner.lr=2e-3", "loop.total_steps=5") == [
        f"{run} is unfinished, but differs (learner.lr 0.001 → 0.002, loop.total_steps 4 → 5): starting a new run; "
        f"to continue that one: resume={run}"
    ]
    assert told("resume=disable", "learner.lr=2e-3") == []
    other_model(tiny_model_folder)
    assert not any(str(run) in line for line in told("model=wider"))
    assert told() == []  # that run itself
    (run / "run.json").write_text(json.dumps(info(run) | {"status": "finished"}))
    assert told("learner.lr=2e-3") == []
