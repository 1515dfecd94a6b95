"""Job scripts for Slurm: what they say, that they are safe shell, and one that really starts Ray, by stand-ins of
Slurm's commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from covey.app.slurm import seconds_of, slurm_time
from covey.cli.main import main
from covey.errors import InputError

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples" / "slurm").glob("*.sh"))


def made(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["slurm", *words]) == 0
    return capsys.readouterr().out


def train_words(text: str) -> list[str]:
    """The words of the training command, as a shell reads them."""
    found = re.search(r"^covey train .*? &$", text, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return shlex.split(found[0].replace("\\\n", " "))[:-1]


def is_shell(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_there_are_examples_of_the_documented_cases() -> None:
    assert [path.name for path in EXAMPLES] == ["async-two-nodes.sh", "single-node.sh", "sync-two-nodes.sh"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_what_its_command_makes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.split(path.read_text().splitlines()[1].removeprefix("# "))
    assert command[:2] == ["covey", "slurm"]
    assert made(capsys, *command[2:]) == path.read_text()
    assert is_shell(path.read_text())


def test_by_turns_all_devices_learn_and_sample(capsys: pytest.CaptureFixture[str]) -> None:
    """4 hours, less a tenth: 216 minutes."""
    text = made(capsys, "demo", "--nodes", "2", "--gpus-per-node", "8", "--time", "04:00:00")
    words = ["cluster=ray", "cluster.nodes=2", "cluster.learner_devices=16", "mode=sync", "loop.max_minutes=216"]
    assert train_words(text) == ["covey", "train", "--config-name", "demo", "--unfinished", "75", *words]
    assert "#SBATCH --gpus-per-node=8\n" in text and "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:TERM@720\n" in text  # half of the margin of 24 minutes


def test_ahead_half_of_them_learn_unless_the_settings_say_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    words = train_words(made(capsys, "demo", "--nodes", "2", "--mode", "async"))
    assert {"mode=async", "cluster.learner_devices=8", "cluster.rollout_devices=8"} <= set(words)
    given = ["cluster.learner_devices=4", "cluster.rollout_devices=12", "loop.max_minutes=7"]
    words = train_words(made(capsys, "demo", "--nodes", "2", "--mode", "async", *given))
    assert words[-3:] == given and "cluster.learner_devices=8" not in words and len(words) == 6 + 3 + 3


def test_values_stay_what_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whatever a value holds, the shell hands it on as one word and runs nothing of it."""
    evil = f'data.system_prompt="it\'s $(touch {tmp_path}/a) `touch {tmp_path}/b`; touch {tmp_path}/c & @SETUP@ x"'
    text = made(capsys, "demo", evil)
    assert train_words(text)[-1] == evil
    assert is_shell(text)
    command = text[text.index("covey train") : text.index(" &\ntrain=")]
    said = subprocess.run(["bash", "-c", f"covey() {{ printf '%s\\n' \"$@\"; }}\n{command}"], capture_output=True)
    assert said.stdout.decode().splitlines()[-1] == evil
    assert list(tmp_path.iterdir()) == []


def test_a_line_break_in_a_value_does_not_leave_the_comment(capsys: pytest.CaptureFixture[str]) -> None:
    text = made(capsys, "demo", 'data.system_prompt="one\ntwo"')
    assert all(line.startswith("#") for line in text.splitlines()[: text.splitlines().index("set -euo pipefail") - 1])
    assert train_words(text)[-1] == 'data.system_prompt="one\ntwo"'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--partition", "a b"], "--partition"),
        (["demo", "--job-name", "x\n#SBATCH --uid=0"], "--job-name"),
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--time", "soon"], "--time"),
        (["demo", "--time", "5", "--margin", "5"], "--margin"),
        (["demo", "--mode", "later"], "--mode"),
        (["demo", "learner.lrr=1"], "learner.lr"),
        (["nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told_before_anything_waits_in_a_queue(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("04:00:00", 14400), ("1-00", 86400), ("2-01:30", 178200), ("1-00:00:05", 86405)],
)
def test_times_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(slurm_time(seconds)) == seconds


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="HH:MM:SS"):
        seconds_of("4h")


# -- a script that runs -----------------------------------------------------------------------------------------------

STAND_INS = {
    # Every step runs here; the words that are Slurm's own are dropped.
    "srun": """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
exec "$@"
""",
    "scontrol": """#!/bin/bash
echo "scontrol $*" >> "$HERE/said"
[[ $1 == show ]] && printf '%s\\n' node1 node2
exit 0
""",
    # Instead of training: who is there, and what it was told; then it ends as it would by the clock, or by SIGTERM.
    "covey": """#!/bin/bash
exec python - "$@" << 'END'
import os, signal, stat, sys, time
def said(text):
    with open(os.environ["HERE"] + "/said", "a") as file:
        print(text, file=file)
import ray
ray.init(log_to_driver=False, logging_level="error")
def over(number, frame):
    said("SIGTERM")
    sys.exit(75)
signal.signal(signal.SIGTERM, over)
token = os.environ["RAY_AUTH_TOKEN_PATH"]
said("alive %d" % sum(node["Alive"] for node in ray.nodes()))
said("cpus %d" % ray.cluster_resources()["CPU"])
said("address %s" % os.environ["RAY_ADDRESS"])
said("token %s %o %d" % (os.environ["RAY_AUTH_MODE"], stat.S_IMODE(os.stat(token).st_mode), len(open(token).read())))
said("words " + " ".join(sys.argv[1:]))
os.kill(os.getppid(), signal.SIGTERM)  # the script, whose child this is: what Slurm does when the time is nearly over
time.sleep(60)
END
""",
}


@pytest.mark.slow
def test_a_script_starts_ray_on_all_nodes_trains_and_queues_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Head and worker are both of this machine. The stand-in sends SIGTERM to the script, as Slurm would."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(made(capsys, "demo", "--nodes", "2", "--gpus-per-node", "0", "--mode", "async"))
    path = f"{stand_ins}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "1"}
    told = {"PATH": path, "HERE": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path), **slurm}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        ["bash", str(script)], env=clean | told, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = (tmp_path / "said").read_text().splitlines()
    port = 20000 + os.getpid() % 10000
    assert said[0] == "scontrol show hostnames node[1-2]"
    assert said[1:3] == ["alive 2", "cpus 2"]
    assert said[3].startswith("address ") and said[3].endswith(f":{port}")
    assert said[4] == "token token 600 65"
    assert "cluster=ray cluster.nodes=2" in said[5]
    assert said[6:] == ["SIGTERM", f"scontrol requeue {os.getpid()}"]
    assert not list((tmp_path / ".covey-slurm").iterdir())  # the token is gone
    assert f"gcs_server_port={port}" not in subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
