"""A folder to run examples in, and a tiny model whose context holds the longest of their prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, byte_tokenizer, tiny_llama

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(one_thread_count: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)  # threads of a model this small wait for each other
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = byte_tokenizer()
    sizes = {"max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    tiny_llama(vocabulary=len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
