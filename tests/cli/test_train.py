"""The command line as people use it, on a tiny model; and their mistakes, which stop before a model loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.agents.environment import EnvironmentAgent
from covey.agents.packages import PackageAgent
from covey.app.checks import check_roles, unused_settings
from covey.app.parts import find_tasks
from covey.cli.main import main
from covey.config.schema import (
    AgentConfig,
    Config,
    DataConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    ModeConfig,
    ModelConfig,
    RolloutConfig,
)
from covey.errors import InputError
from covey.imports import install_extra
from covey.tasks import load_tasks
from covey.telemetry.key_metrics import is_machine_dependent
from covey.types import Task

SMALL = [
    "data.val_size=4",
    "data.train_batch_size=2",
    "rollout.group_size=4",
    "rollout.max_tokens=6",
    "loop.total_steps=2",
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def the_run() -> Path:
    (found,) = (path.parent for path in Path("outputs").glob("*/*/run.json"))
    return found


@pytest.mark.parametrize("algorithm", ["gvpo", "grpo"])
def test_a_run_leaves_everything_in_its_folder(tiny_model_folder: Path, algorithm: str) -> None:
    labels = ["logging.tags=[baseline,long]", "logging.notes=a first try, with defaults"]
    assert main(["train", f"model={tiny_model_folder}", f"algorithm={algorithm}", *labels, *SMALL]) == 0
    run = the_run()
    info = json.loads((run / "run.json").read_text())
    assert (info["tags"], info["notes"]) == (["baseline", "long"], "a first try, with defaults")
    names = {p.name for p in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "episodes.jsonl", "checkpoints", ".hydra"} <= names
    assert {"summary.md", "curve.png", "run.json"} <= names
    (kept,) = run.glob("checkpoints/*/config.yaml")
    assert kept.read_text() == (run / "config.yaml").read_text()
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["eval", "step", "step", "eval"]
    record = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    (row,) = record["rows"]
    lengths = {len(row[name]) for name in ("response_ids", "mask", "text", "logprobs", "advantage", "ratio", "entropy")}
    assert len(lengths) == 1
    assert row["ratio"] == pytest.approx([1.0] * len(row["ratio"]), abs=1e-3)  # on-policy


def test_metrics_carry_the_names_people_watch(tiny_model_folder: Path) -> None:
    main(["train", f"model={tiny_model_folder}", *SMALL])
    steps = [json.loads(line) for line in (the_run() / "metrics.jsonl").read_text().splitlines()]
    metrics = next(r["metrics"] for r in steps if r["kind"] == "step")
    assert {"gvpo/loss", "gvpo/mean_reward", "gvpo/mean_weight", "actor/entropy_loss", "train/reward"} <= set(metrics)
    assert metrics["gvpo/mean_weight"] == pytest.approx(0, abs=1e-6)
    assert "eval/accuracy" in steps[0]["metrics"]


def test_same_seed_same_result(tiny_model_folder: Path) -> None:
    for _ in range(2):
        main(["train", f"model={tiny_model_folder}", "resume=disable", "reward=exact", *SMALL])
    first, second = (
        [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in sorted(Path("outputs").glob("*/*"))
    )
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if not is_machine_dependent(k)} == {
            k: v for k, v in b.items() if not is_machine_dependent(k)
        }


def test_a_file_of_your_own_with_a_reward_of_your_own(tiny_model_folder: Path) -> None:
    rows = [{"question": f"q {i}", "answer": str(i), "hint": "x"} for i in range(4)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("score.py").write_text(
        "def short(final_answer, hint):\n    return {'reward': -len(final_answer), 'seen': 1.0}\n"
    )
    words = ["data.train_files=mine.jsonl", "data.val_files=mine.jsonl", "reward=score.py:short"]
    assert main(["train", f"model={tiny_model_folder}", *words, *SMALL]) == 0
    metrics = json.loads((the_run() / "metrics.jsonl").read_text().splitlines()[1])["metrics"]
    assert metrics["reward/short/seen/mean"] == 1.0


def test_an_agent_of_your_own(tiny_model_folder: Path) -> None:
    Path("twice.py").write_text(
        "import covey\n@covey.agent\nasync def twice(policy, task):\n"
        "    first = await policy.chat(task.messages)\n"
        "    again = [*task.messages, {'role': 'assistant', 'content': first}, {'role': 'user', 'content': 'sure?'}]\n"
        "    return await policy.chat(again)\n"
    )
    assert main(["train", f"model={tiny_model_folder}", "agent=twice.py:twice", "reward=exact", *SMALL]) == 0
    record = json.loads((the_run() / "episodes.jsonl").read_text().splitlines()[0])
    assert sum(sum(row["mask"]) for row in record["rows"]) > 6  # both turns are learned from


def test_multirun_runs_every_combination(tiny_model_folder: Path) -> None:
    words = ["data=sort", "mode=sync", "--multirun", "optimizer.lr=1e-4,1e-5", "rollout.temperature=0.9,1.0"]
    assert main(["train", f"model={tiny_model_folder}", *words, *SMALL, "loop.save_final=false"]) == 0
    assert [p.parent.name for p in sorted(Path("multirun").glob("*/*/*/run.json"))] == ["0", "1", "2", "3"]


def test_validate_only_and_dry_run_start_nothing(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model={tiny_model_folder}", "algorithm.gvpo_beta=0.15", "data.train_batch_size=16"]
    assert main(["train", *words, "--validate-only"]) == 0
    assert "valid: nothing was started" in capsys.readouterr().out
    assert main(["train", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "beta: 0.15" in out and "16 tasks × 8 attempts = 128 episodes a step" in out
    assert not Path("outputs").exists()


def test_validate_only_calls_nothing_valid_that_would_be_refused(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", f"model={tiny_model_folder}", "rollout=sglang", "--validate-only"]
    assert main(words) == 2
    out = capsys.readouterr().out
    assert "warning: a run would be refused: not supported yet: other engines" in out
    assert out.endswith("not valid: a run would be refused, see above; nothing was started\n")
    assert main([*words, "--strict"]) == 2
    assert "not supported yet: other engines" in capsys.readouterr().err
    assert main([*words, "--multirun", "seed=0,1"]) == 2


def test_all_that_is_missing_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["train", "model=here/nothing", "data.train_files=a.jsonl", "data.val_files=b.jsonl", "loop.total_epochs=3"]
    assert main([*words, "--validate-only"]) == 0
    out = capsys.readouterr().out
    assert "training   3 epochs (an unknown number of steps: the tasks are not here) of 8 tasks" in out
    assert "the settings are valid, but 2 things are not on this machine, see above" in out
    assert main(words) == 2
    told = capsys.readouterr().err
    for text in ("data.train_files: no such file a.jsonl", "data.val_files: no such file b.jsonl", "here/nothing"):
        assert text in out and text in told


def test_eval_and_sample_read_a_run(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", f"model={tiny_model_folder}", *SMALL])
    capsys.readouterr()
    assert main(["eval", str(the_run()), "--json", "out.json"]) == 0
    trained = json.loads((the_run() / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert json.loads(Path("out.json").read_text())["eval/accuracy"] == trained["eval/accuracy"]
    assert main(["sample", str(the_run()), "-n", "2", "--tasks", "1"]) == 0
    assert capsys.readouterr().out.count("log-prob") == 2
    assert main(["sample", str(tiny_model_folder), "--question", "hello?", "-n", "1", "rollout.max_tokens=4"]) == 0
    assert "hello?" in capsys.readouterr().out


def test_a_lora_run_can_be_evaluated_but_its_adapter_is_no_start_for_a_reference(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    assert main(["train", f"model={tiny_model_folder}", "model.lora.rank=4", *SMALL]) == 0
    assert main(["eval", str(the_run())]) == 0
    assert "eval/accuracy" in capsys.readouterr().out
    (adapter,) = the_run().glob("checkpoints/*/model")
    assert main(["train", f"model={adapter}", "algorithm.reference=initial", *SMALL]) == 2
    assert "is an adapter" in capsys.readouterr().err


MISTAKES = {
    "unknown algorithm": (["algorithm=gvop"], "did you mean   gvpo?"),
    "unknown reward": (["reward=exat"], "did you mean   exact?"),
    "unknown task": (["data=sorrt"], "did you mean   sort?"),
    "unknown model": (["model=smollm2-135"], "did you mean   smollm2-135m?"),
    "unknown key": (["learner.lrr=1"], "did you mean   learner.lr"),
    "unknown section": (["dta=sort"], "did you mean   data  (= data.name"),
    "unknown flag": (["--validate"], "did you mean   --validate-only?"),
    "unknown recipe": (["--config-name", "demmo"], "did you mean   demo?"),
    "group of one": (["rollout.group_size=1"], "it needs at least 2"),
    "prompt too long": (["rollout.max_tokens=600"], "longer than the context of 512"),
    "steps and epochs": (["loop.total_steps=3", "loop.total_epochs=1"], "contradict each other"),
    "not yet": (["rollout=sglang"], "not supported yet"),
    "wrong type": (["learner.lr=fast"], "learner.lr must be a number from 0 to 10, got 'fast'"),
    "greedy groups": (["rollout.temperature=0"], "must be a number from 0.001 to 100"),
    "resume from nowhere": (["resume=nowhere"], "not a run's folder"),
    "missing column for a reward": (["reward=countdown"], "countdown"),
    "a word": (["demo"], "settings are key=value"),
    "beta of zero": (["algorithm.beta=0"], "beta must be a number above 0"),
    "top_p of two": (["rollout.top_p=2"], "top_p must be a number above 0 and at most 1, got 2.0"),
    "negative frequency": (["loop.save_every=-2"], "must be a whole number from 0"),
    "nothing to train on": (["data.val_files=rows.jsonl"], "nothing to train on"),
    "a logger that is not installed": (["logging.to=[wandb]"], install_extra("wandb")),
    "device": (["model.device=cuda"], "sees no GPU"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_before_anything_starts(
    name: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = MISTAKES[name]
    if name != "unknown model":
        words = [f"model={tiny_model_folder}", *words]
    Path("rows.jsonl").write_text('{"question": "a", "answer": "b"}')
    if name == "a logger that is not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    if name == "device":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.endswith("nothing was started\n")
    assert not list(Path().glob("outputs/*/*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "1+1", "answer": "2"}\n{"question": oops}\n', "train.jsonl, line 2: not JSON"),
        ('{"qestion": "1+1", "answer": "2"}\n', "question"),
        ("", "train.jsonl"),
        ('{"question": 5, "answer": "2"}\n', "line 1"),
    ],
    ids=["malformed", "missing column", "empty", "wrong type"],
)
def test_bad_files_are_named_by_line(
    text: str, message: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.jsonl").write_text(text)
    assert main(["train", f"model={tiny_model_folder}", "data.train_files=train.jsonl"]) == 2
    assert message in capsys.readouterr().err


def test_a_reward_that_always_raises_is_diagnosed(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("def bad(final_answer):\n    raise KeyError('oops')\n")
    assert main(["train", f"model={tiny_model_folder}", "reward=bad.py:bad", "eval.before=false", *SMALL]) == 1
    err = capsys.readouterr().err
    assert "No training tasks completed" in err and "8 × reward" in err and "likely fix" in err
    assert json.loads((the_run() / "run.json").read_text())["status"] == "failed"


def test_help_fits_a_screen_and_names_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "demo" in out and "algorithm=gvpo" in out
    assert all(len(line) <= 120 for line in out.splitlines())
    assert len(out.splitlines()) <= 45


def test_doctor_config_and_algorithms_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    assert "torch" in capsys.readouterr().out
    assert main(["config", "algorithm=grpo", "learner.lr=3e-5"]) == 0
    assert "lr: 3.0e-05" in capsys.readouterr().out
    assert main(["config", "explain", "rollout.n"]) == 0
    assert "rollout.group_size" in capsys.readouterr().out
    assert main(["algorithms"]) == 0
    assert "gvpo" in capsys.readouterr().out
    assert main(["trian"]) == 2


def test_an_interrupted_run_says_so_and_its_figures_stay(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle: status interrupted, the process ends at once, and a second start leaves the first alone."""
    import os
    import signal
    import subprocess
    import time

    command = [sys.executable, "-m", "covey.cli.main", "train", f"model={tiny_model_folder}", *SMALL]
    command += ["loop.total_steps=100000", "eval.before=false"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        written = [p for p in tmp_path.glob("outputs/*/*/metrics.jsonl") if p.stat().st_size]
        if written:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "there is no checkpoint to continue from" in err
    assert json.loads((the_run() / "run.json").read_text())["status"] == "interrupted"
    figures = written[0].read_bytes()
    assert main(["train", f"model={tiny_model_folder}", *SMALL]) == 0
    assert written[0].read_bytes() == figures


def test_ctrl_c_in_the_midst_of_a_librarys_work_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that tidies up may break in its own way, and its error is what arrives."""

    def broken(argv: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("'NoneType' object has no attribute 'x'")

    monkeypatch.setattr("covey.cli.main._command", lambda word, argv: broken(argv))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": ModelConfig(lora=LoraConfig(alpha=8.0))}, "model.lora.alpha has no effect without model.lora.rank"),
        ({"model": ModelConfig(freeze_vision=False)}, "model.freeze_vision has no effect: m reads text only"),
        ({"agent": AgentConfig(train_modules=["verifier"])}, "agent.train_modules has no effect with agent=chat"),
        ({"agent": AgentConfig(environment="x")}, "agent.environment has no effect with agent=chat"),
        ({"agent": AgentConfig(command="python a.py")}, "agent.command has no effect with agent=chat"),
        ({"agent": AgentConfig(keep_images=2)}, "agent.keep_images has no effect: m reads text only"),
        ({"mode": ModeConfig(max_uses=2)}, "mode.max_uses has no effect with mode=sync"),
        ({"mode": ModeConfig(max_staleness=2)}, "mode.max_staleness has no effect with mode=sync"),
        ({"mode": ModeConfig(publish_every=2)}, "mode.publish_every has no effect with mode=sync"),
        ({"mode": ModeConfig(update="drain")}, "mode.update has no effect with mode=sync"),
        ({"eval": EvalConfig(n=4)}, "eval.n has no effect with eval.modes=[greedy]"),
        ({"eval": EvalConfig(temperature=0.5)}, "eval.temperature has no effect with eval.modes=[greedy]"),
        ({"learner": LearnerConfig(min_lr_ratio=0.1)}, "learner.min_lr_ratio has no effect with learner.schedule=cons"),
    ],
)
def test_settings_that_nothing_reads_are_warned_of(settings: dict[str, Any], said: str) -> None:
    text_model: Any = SimpleNamespace(name="m", vision=None)
    (warning,) = unused_settings(Config(**settings), text_model, ())
    assert warning.startswith(said)


def test_settings_that_are_read_are_not_warned_of() -> None:
    vision_model: Any = SimpleNamespace(name="m", vision=object())
    config = Config(
        agent=AgentConfig(name="gateway", command="python a.py", keep_images=2),
        mode=ModeConfig(name="async", max_staleness=3, max_uses=2, publish_every=2, update="drain"),
        eval=EvalConfig(modes=["greedy", "sampled"], n=4, temperature=0.5, top_p=0.9, top_k=5),
        learner=LearnerConfig(schedule="cosine", min_lr_ratio=0.1),
    )
    assert unused_settings(config, vision_model, ("mode.update=drain",)) == []
    assert unused_settings(Config(), None, ()) == []


def test_weights_change_between_the_answers_of_vllm() -> None:
    config = Config(mode=ModeConfig(name="async"), rollout=RolloutConfig(name="vllm"))
    assert unused_settings(config, None, ()) == []
    (warning,) = unused_settings(config, None, ("mode=async", "mode.update=in_flight"))
    assert warning.startswith("mode.update=in_flight has no effect with rollout=vllm")


def test_roles_of_a_coroutine_are_refused(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "async def play(policy, task):\n    return await policy.chat(task.messages)\n"
    Path("co.py").write_text(code)
    words = [f"model={tiny_model_folder}", "agent=co.py:play", "agent.train_roles=[a]"]
    assert main(["train", *words, *SMALL]) == 2
    assert "agent.train_roles=['a'] is for environments of your own" in capsys.readouterr().err


def test_roles_of_a_packages_environment_are_refused() -> None:
    """Its turns have no roles."""
    config = Config(agent=AgentConfig("openenv", train_roles=["a"]))
    with pytest.raises(InputError, match=r"\['a'\] is for environments of your own, not for agent=openenv"):
        check_roles(config, PackageAgent(object, 3))
    check_roles(config, EnvironmentAgent(object, 3))


def test_tasks_that_are_not_used_are_warned_of(tmp_path: Path) -> None:
    class Environment:
        def tasks(self, size: int | None) -> tuple[Task, ...]:
            return tuple(Task(str(n), ({"role": "user", "content": "q"},)) for n in range(3))

    config = Config(data=DataConfig(train_files="rows.jsonl", name="countdown"), agent=AgentConfig("gymnasium"))
    environment: Any = Environment()
    assert [text.partition(":")[0] for text in find_tasks(config, environment).warnings] == [
        "data.name has no effect",
        "data.train_files has no effect",
    ]
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "x"}\n')
    assert (
        "data.val_size=4 has no effect without data.val_files: no tasks are held out"
        in load_tasks(DataConfig(train_files="rows.jsonl", val_size=4), seed=0).warnings
    )
