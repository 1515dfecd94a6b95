"""A model hub that does not answer is reported after one request, and cached models still load."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from covey.config.schema import ModelConfig
from covey.errors import Absent
from covey.models import hub
from covey.models.loading import open_source

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """Counts requests, and sends each the same answer, or none."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.requests = answer, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed: the test is over
                return
            self.open.append(connection)
            if connection.recv(65536):
                self.requests += 1
            if self.answer is not None:
                connection.sendall(self.answer)
                connection.close()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for connection in self.open:
            connection.close()


@pytest.fixture
def silent() -> Iterator[Server]:
    server = Server(None)
    yield server
    server.close()


@pytest.fixture
def pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An empty cache, a fresh state, and the pauses of huggingface_hub between its attempts."""
    found: list[float] = []
    monkeypatch.setattr(_http.time, "sleep", found.append)
    monkeypatch.setattr(hub, "_state", hub._State())
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for module in ("huggingface_hub.constants", "transformers.utils.hub", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    return found


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """HF_ENDPOINT, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def put_into_cache(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(model, home / "snapshots" / ("1" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("1" * 40)


def test_a_closed_port(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    use(monkeypatch, address)
    with pytest.raises(Absent) as caught:
        open_source(ModelConfig(name="no/such-model"))
    assert f"cannot load model  no/such-model\n  {address} does not answer: [Errno" in str(caught.value)
    assert "copy the model's folder here and use model=/path/to/folder" in str(caught.value)
    assert pauses == []


def test_a_server_that_never_answers_is_probed_once(
    pauses: list[float], silent: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, silent.address)
    begun = time.monotonic()
    for _ in range(2):  # the second attempt reuses the result of the first
        with pytest.raises(Absent, match=f"{silent.address} does not answer within 0.3 s"):
            open_source(ModelConfig(name="no/such-model"))
    assert time.monotonic() - begun < 30
    assert (silent.requests, pauses) == (1, [])


def test_huggingface_hubs_own_timeout_is_used(
    pauses: list[float], silent: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, silent.address)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    with pytest.raises(Absent, match="does not answer within 1 s"):
        open_source(ModelConfig(name="no/such-model"))


def test_a_model_of_the_cache_is_read_without_the_hub(
    pauses: list[float], silent: Server, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_cache(tmp_path, tiny_model_folder)
    use(monkeypatch, silent.address)
    source = open_source(ModelConfig(name="someone/tiny"))
    assert source.revision == "1" * 40 and source.config.hidden_size == 32
    assert (silent.requests, pauses) == (1, [])


def test_a_hub_that_answers_again_is_used_again(
    pauses: list[float], silent: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, silent.address)
    hub.check_reachable()
    assert constants.HF_HUB_OFFLINE and hub.unreachable()
    server = Server(NOT_FOUND)  # even an HTTP error counts as an answer
    use(monkeypatch, server.address)
    with pytest.raises(Absent, match="cannot load model"):
        open_source(ModelConfig(name="no/such-model"))
    assert server.requests > 1 and not constants.HF_HUB_OFFLINE and hub.unreachable() is None
    server.close()


def test_offline_by_choice_sends_no_request(
    pauses: list[float], silent: Server, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_cache(tmp_path, tiny_model_folder)
    use(monkeypatch, silent.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(ModelConfig(name="someone/tiny")).revision == "1" * 40
    assert silent.requests == 0 and constants.HF_HUB_OFFLINE
