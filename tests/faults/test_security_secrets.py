"""Keys never reach logs, settings or run folders: a run with planted secrets, of which every byte is searched."""

from __future__ import annotations

import base64
import html
import http.client
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey import redact
from covey.cli.main import _print_traceback, main
from covey.config import compose
from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from covey.dashboard.static_page import html_report, markdown_report, read_all
from covey.errors import InputError
from covey.redact import MASK, RedactedStream, hide, hide_known, hide_settings, hide_words, is_secret_name
from tests.conftest import ROOT

SECRETS = {
    "WANDB_API_KEY": "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c",
    "HF_TOKEN": "hf_QuailQuailQuailQuailQuailQuail",
    "JUDGE_KEY": "judge/key+with=odd\"marks'9",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/quail",
    "MLFLOW_TRACKING_URI": "http://quailuser:mlflow-pass-77@127.0.0.1:1/",
}
IN_FILE = {"DOTENV_TOKEN": "from-the-env-file-4711"}
IN_SETTINGS = {"api_key": "an-option-of-the-reward-8899", "password": "address-pass-word-55"}
EVERY = [*SECRETS.values(), *IN_FILE.values(), *IN_SETTINGS.values(), "mlflow-pass-77"]

REWARDS = """
import os
from covey.rewards import reward

@reward
def leaky(final_answer, api_key=""):
    if os.environ.get("ALWAYS") or len(final_answer) % 2:
        headers = {"Authorization": "Bearer " + os.environ["JUDGE_KEY"], "x-api-key": api_key}
        raise RuntimeError(f"the server refused {headers} and {os.environ['DOTENV_TOKEN']} {os.environ['HF_TOKEN']}")
    print("my key is", api_key)
    return {"reward": float(len(final_answer))}
"""


class Echo(BaseHTTPRequestHandler):
    """A judge that shows what it was sent, and refuses every other question."""

    asked = 0

    def do_POST(self) -> None:
        Echo.asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        given = self.headers.get("Authorization", "")
        words = {"choices": [{"message": {"content": f"{given}\nScore: 7"}}]}
        if Echo.asked % 2:
            self.send_response(403, "no")
            words = {"error": f"bad header {given}"}
        else:
            self.send_response(200)
        body = json.dumps(words).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def judge() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DRIVER = """
import json, os, sys
from covey.cli.main import main
words, more = json.loads(sys.argv[1]), json.loads(sys.argv[2])
print("first", main([*words, "logging.output_dir=one"]), flush=True)
os.environ["ALWAYS"] = "yes"
print("second", main([*words, *more, "logging.output_dir=two"]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A run that ends, with episodes that fail; and one that fails altogether. Their folder, and all that they said."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "mine.py").write_text(REWARDS)
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in IN_FILE.items()))
    password = IN_SETTINGS["password"]
    with judge() as port:
        words = [
            "train", f"model={tiny_model_folder}", "reward=[mine.py:leaky,judge]", "data.train_batch_size=4",
            f"+reward.options.leaky.api_key={IN_SETTINGS['api_key']}",
            f"+reward.options.judge.url=http://127.0.0.1:{port}/v1", "+reward.options.judge.model=m",
            "+reward.options.judge.api_key_env=JUDGE_KEY", "+reward.options.judge.retries=0",
            f"+reward.options.judge.cache={folder}/cache.jsonl",
            "data.val_size=4", "rollout.group_size=4", "rollout.max_tokens=6", "loop.total_steps=1",
            "eval.before=false", "eval.after=false",
        ]  # fmt: skip
        more = [f"reward.options.judge.url=http://quailuser:{password}@127.0.0.1:{port}/v1"]
        environment = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(words), json.dumps(more)],
            cwd=folder, env=environment, capture_output=True, timeout=500, check=False,
        )  # fmt: skip
    assert b"first 0" in done.stdout and b"second 1" in done.stdout, (done.stdout + done.stderr).decode()[-3000:]
    return folder, done.stdout + done.stderr


def leaks(content: bytes) -> list[str]:
    forms = {secret: {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], secret[:12]} for secret in EVERY}
    return [secret for secret, written in forms.items() if any(form.encode() in content for form in written)]


def test_every_byte_of_the_runs(ran: tuple[Path, bytes]) -> None:
    folder, _ = ran
    ours = {"mine.py", ".env"}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ours]
    names = {path.name for path in files}
    assert {"config.yaml", "overrides.yaml", "run.json", "episodes.jsonl", "summary.md", "cache.jsonl"} <= names
    assert {str(path): found for path in files if (found := leaks(path.read_bytes()))} == {}
    assert MASK in (folder / "cache.jsonl").read_text(), "the judge did send the key back"
    (settings,) = folder.glob("two/*/*/config.yaml")
    assert f"api_key: {MASK}" in settings.read_text() and f"http://{MASK}@127" in settings.read_text()
    assert "api_key_env: JUDGE_KEY" in settings.read_text()


def test_every_byte_that_was_printed(ran: tuple[Path, bytes]) -> None:
    fragments = ran[1].replace(b"my key is " + IN_SETTINGS["api_key"].encode(), b"")  # printed by the reward itself
    assert leaks(fragments) == []
    assert b"the server refused" in fragments and MASK.encode() in fragments


def test_every_byte_of_the_page_and_the_report(ran: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that an older version, or someone else, wrote with secrets in its settings."""
    folder, _ = ran
    (run,) = folder.glob("one/*/*")
    old = run / "config.yaml"
    before = old.read_text()
    text = before.replace(MASK, IN_SETTINGS["api_key"])
    monkeypatch.setenv("JUDGE_KEY", SECRETS["JUDGE_KEY"])
    old.write_text(text + f"note: http://quailuser:{IN_SETTINGS['password']}@host/\n")
    try:
        library = Library([run])
        read_all(library)
        content = html_report([run], episodes=8).encode() + markdown_report(run).encode()
        with Dash(library) as dash:
            connection = http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)
            for asked in ("runs", "run?run=0", "episodes?run=0", "episode?run=0&id=0", "compare?runs=0", "csv?run=0"):
                connection.request("GET", f"/api/{asked}", headers={"Cookie": f"covey_dash_{dash.port}={dash.token}"})
                answer = connection.getresponse()
                assert answer.status == 200
                content += answer.read()
            connection.close()
    finally:
        old.write_text(before)
    assert leaks(content) == [] and MASK.encode() in content


def test_redacted_settings_are_requested_again(ran: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = ran[0].glob("two/*/*/config.yaml")
    from covey.algorithms import algorithm_schemas

    monkeypatch.chdir(ran[0])
    with pytest.raises(InputError, match=r"reward\.options\.\w+\.\w+: a secret, which is not stored"):
        compose([], algorithms=algorithm_schemas(), config_path=settings)
    again = ["reward.options.leaky.api_key=another-key-1", "reward.options.judge.url=http://host/v1"]
    assert compose(again, algorithms=algorithm_schemas(), config_path=settings).config.reward.options["judge"]


def test_job_scripts_and_sweeps_refuse_secrets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    word = f"+reward.options.leaky.api_key={IN_SETTINGS['api_key']}"
    where = tmp_path / "job.sh"
    assert main(["slurm", "demo", "--nodes", "1", "--gpus-per-node", "1", "--output", str(where), word]) == 2
    output = capsys.readouterr().err
    assert (
        "would be written into the job script" in output and IN_SETTINGS["api_key"] not in output and not where.exists()
    )
    from covey.app.sweep import refuse_secrets

    with pytest.raises(InputError, match="the files of its jobs"):
        refuse_secrets(["learner.lr=1", "reward.options.judge.url=http://a:b@c/v1"], "the files of its jobs")
    refuse_secrets(["learner.lr=1e-5", "reward.options.judge.api_key_env=KEY"], "x")


def test_settings_are_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", f"+reward.options.leaky.api_key={IN_SETTINGS['api_key']}"]) == 0
    fragments = capsys.readouterr().out
    assert IN_SETTINGS["api_key"] not in fragments and f"api_key: {MASK}" in fragments


def test_the_traceback_of_an_uncaught_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "the-token-nobody-sees")
    try:
        raise KeyError("Authorization: Bearer abcdefghij and the-token-nobody-sees")
    except KeyError as error:
        _print_traceback(KeyError, error, error.__traceback__)
    fragments = capsys.readouterr().err
    assert (
        "Traceback" in fragments
        and f"Bearer {MASK} and {MASK}" in fragments
        and "nobody-sees" not in fragments.split("KeyError")[-1]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("WANDB_API_KEY", True), ("HF_TOKEN", True), ("reward.options.judge.api_key", True), ("apiKey", True),
        ("DB_PASSWORD", True), ("AWS_SECRET_ACCESS_KEY", True), ("authToken", True), ("credentials", True),
        ("api_key_env", False), ("TOKENIZERS_PARALLELISM", False), ("max_tokens", False), ("RAY_AUTH_MODE", False),
        ("RAY_AUTH_TOKEN_PATH", False), ("SSH_AUTH_SOCK", False), ("KEYBOARD", False), ("rollout.max_tokens", False),
        ("monkey", False), ("tokenizer", False), ("author", False),
        ("PGPASSWORD", True), ("SSHPASS", True), ("DB_PASS", True), ("ROOT_PASSWORD_2", True), ("user_pass", True),
        ("VOLC_SK", True), ("ALIYUN_AK_SK", True), ("GHTOKEN", True), ("MINIO_SECRETKEY", True), ("MYAPIKEY", True),
        ("SLACK_WEBHOOK_URL", True), ("alerts.webhook", True), ("DB_PASS_FILE", False), ("WEBHOOK_PATH", False),
        ("BYPASS", False), ("COMPASS", False), ("PASS_RATE", False), ("pass_rate", False), ("first_pass", False),
        ("TASK", False), ("DISK", False), ("mask", False), ("HOTKEY", False), ("eval.pass_at_k", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, expected: bool) -> None:
    assert is_secret_name(name) is expected


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("POST http://user:pass@host/v1", f"POST http://{MASK}@host/v1"),
        ("https://host/x?api_key=abc&n=1", f"https://host/x?api_key={MASK}&n=1"),
        ("{'Authorization': 'Bearer abc.def-123'}", f"{{'Authorization': 'Bearer {MASK}'}}"),
        ('{"x-api-key": "abcdefgh"}', f'{{"x-api-key": "{MASK}"}}'),
        ("key sk-abcdefghijklmnop1234 was refused", f"key {MASK} was refused"),
        (f"OPENAI_API_KEY=ck-{'a1-_' * 8}", f"OPENAI_API_KEY={MASK}"),
        ("the bearer of this letter", "the bearer of this letter"),
        ("mail to a@b.example. Basic training", "mail to a@b.example. Basic training"),
        ("authorization=abcdefgh", f"authorization={MASK}"),
        ("reward api_key_env=JUDGE_KEY", "reward api_key_env=JUDGE_KEY"),
        ("to https://hooks.slack.com/services/T01/B02/x1y2z3.", f"to https://hooks.slack.com/{MASK}"),
        ("https://discord.com/api/webhooks/1042/aB-3_" + "x" * 60, f"https://discord.com/api/webhooks/{MASK}"),
        (
            "'https://acme.webhook.office.com/webhookb2/1-2@3/IncomingWebhook/9f'",
            f"'https://acme.webhook.office.com/{MASK}'",
        ),
        ("https://outlook.office.com/webhook/0f1e2d3c-4b5a-6978-8796/x", f"https://outlook.office.com/webhook/{MASK}"),
        (
            "https://open.feishu.cn/open-apis/bot/v2/hook/0f1e2d3c-4b5a-6978",
            f"https://open.feishu.cn/open-apis/bot/v2/hook/{MASK}",
        ),
        ("https://api.telegram.org/bot12345:AAbbCC/sendMessage", f"https://api.telegram.org/{MASK}"),
        (
            "https://docs.example/webhooks/about-events-and-payloads",
            "https://docs.example/webhooks/about-events-and-payloads",
        ),
        ("https://chat.example:8443/hooks/a1b2c3d4e5f6a1b2c3", f"https://chat.example:8443/hooks/{MASK}"),
    ],
)
def test_texts_that_look_like_secrets(text: str, hidden: str) -> None:
    assert hide(text) == hidden


def test_known_secrets_are_hidden_in_every_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in URLs and HTML, and in base64, also within other text."""
    secret = "pa ss/word+é<&>=1"
    monkeypatch.setenv("PGPASSWORD", secret)
    raw = secret.encode()
    written = [
        urllib.parse.quote(secret), urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret),
        urllib.parse.quote(secret).lower(), html.escape(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1],
    ]  # fmt: skip
    for form in written:
        assert hide_known(f"x={form}&y") == f"x={MASK}&y"
    for before, after in itertools.product((b"", b"a", b"ab", b"quail:", b"user:"), (b"", b"\n", b"!!", b" and more")):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            left, right = hide_known(encode(before + raw + after).decode()).split(MASK)
            # Four characters are three bytes: the remaining ones encode the surrounding text.
            assert len(left) <= math.ceil(len(before) * 4 / 3)
            assert len(right.rstrip("=")) <= math.ceil(len(after) * 4 / 3) + 1


def test_a_webhook_of_the_environment_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALERTS_WEBHOOK_URL", "https://alerts.example/in/abc123")
    assert hide_known("POST https://alerts.example/in/abc123 failed") == f"POST {MASK} failed"
    assert hide_settings({"webhook": "https://alerts.example/in/x"}) == {"webhook": MASK}


def test_records_lose_only_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", 'quo"ted-secret')
    fragments = json.dumps({"a": 'quo"ted-secret', "b": "Bearer abcdefghijkl"})
    assert json.loads(hide_known(fragments)) == {"a": MASK, "b": "Bearer abcdefghijkl"}


def test_a_tree_and_words_and_a_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"judge": {"api_key": "abc", "url": "http://u:p@h/v1", "n": 3, "api_key_env": "K"}, "keys": ["x"]}
    shown = {"judge": {"api_key": MASK, "url": f"http://{MASK}@h/v1", "n": 3, "api_key_env": "K"}, "keys": ["x"]}
    assert hide_settings(tree) == shown
    assert hide_words(["a.api_key=abc", "b=1", "--x"]) == [f"a.api_key={MASK}", "b=1", "--x"]
    monkeypatch.setattr(redact, "_remembered", set())
    redact.remember_secrets({"token": "learned-from-settings"})
    print("x learned-from-settings ?token=ours", file=RedactedStream(sys.stdout))
    assert capsys.readouterr().out == f"x {MASK} ?token=ours\n"


def test_another_key_is_the_same_run() -> None:
    from covey.config.compose import fingerprint

    one, two = ({"reward": {"options": {"j": {"api_key": key}}}} for key in ("first-key", "second-key"))
    assert fingerprint(one) == fingerprint(two) != fingerprint({"reward": {"options": {"j": {"api_kex": "a"}}}})


@pytest.mark.parametrize(("words", "expected"), [([], None), (["reward.options.x.api_key=abcdefgh"], True)])
def test_a_tracker_does_not_get_a_command_with_a_secret(
    words: list[str], expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B records the command line; its settings are redacted like all others."""
    from covey.config.schema import LoggingConfig
    from covey.telemetry import trackers
    from covey.telemetry.base import RunInfo

    output: dict[str, Any] = {}

    class Fake:
        def init(self, **options: Any) -> Any:
            output.update(options)
            return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(trackers, "require", lambda *_: Fake())
    monkeypatch.setattr(sys, "argv", ["covey", "train", *words])
    trackers.WandbSink(RunInfo(tmp_path, "t", "gvpo", "m", "sort", 1), LoggingConfig())
    assert (output["settings"] or {}).get("x_disable_meta") is expected


def test_harmless_names_that_sound_like_secrets_stay() -> None:
    """Variable names, column names, markers, common words."""
    from covey.redact import hidden_setting, hide_settings, known_secrets, remember_secrets

    plain = {"headers_from_env": {"Authorization": "MY_VARIABLE"}, "answer_key": "answer", "think_token": "</think>"}
    assert hide_settings(plain) == plain
    remember_secrets(plain)
    remember_secrets({"api_key": "ollama"})
    assert not {"MY_VARIABLE", "answer", "</think>", "ollama"} & set(known_secrets())
    assert hide_settings({"api_key": "ollama", "env": {"API_KEY": "x1"}}) == {"api_key": MASK, "env": {"API_KEY": MASK}}
    assert hidden_setting({"servers": [{"url": "a"}, {"token": MASK}]}) == "servers.token"
    assert hidden_setting({"command": f"curl -H 'Authorization: Bearer {MASK}'"}) == "command"


def test_a_run_is_recognised_even_if_its_name_looks_like_a_secret(tmp_path: Path) -> None:
    from covey.training.folder import RunFolder, read_info

    info = {"project": "p", "experiment": "sk-learn-regression-baseline", "fingerprint": "f", "status": "running"}
    RunFolder(tmp_path, (tmp_path / ".lock").open("w")).write_info(info | {"note": "sk-learn-regression-baseline"})
    assert {key: read_info(tmp_path)[key] for key in info} == info
    assert read_info(tmp_path)["note"] == MASK
