"""Every Python block of the pages runs. What a page takes for granted (a model that is loaded, rewards that are known)
is given here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import covey
import covey.trl
from covey.cli.main import main
from tests.docs.pages import PYTHON, Block
from tests.docs.scaled import scaled

MODELS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from covey.models.loading import locate
folder = locate("smollm2-135m").path
model, ref_model = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
tokenizer = AutoTokenizer.from_pretrained(folder)
"""
GIVEN = {  # by a line of the block
    "class Rloo:": """
from dataclasses import dataclass
from typing import ClassVar
from covey.algorithms.ops import group_mean, group_size
from covey.protocols import Advantages, Needs
from covey.types import Samples
""",
    'covey.advantages("rloo", rewards': f"""
import torch, covey
{MODELS}
generator = torch.Generator().manual_seed(0)
rewards, groups, g = torch.tensor([1.0, 0.0, 0.5, 1.0]), [0, 0, 1, 1], [0, 0, 1, 1]
mask, adv = torch.ones(4, 3), torch.tensor([1.0, -1.0, -1.0, 1.0])
logprobs, old, values, ref = (-torch.rand(4, 3, generator=generator) for _ in range(4))
ref_logprobs = ref
token_rewards, turns = torch.rand(4, 3, generator=generator), torch.tensor([[0, 0, 1]] * 4)
prompts, completions, scores = ["1 + 1 ="], [["2", "3", "4", "5"]], [[1.0, 0.0, 0.0, 0.0]]
""",
    "trainer = GVPOTrainer(model=model": MODELS,
    'choose_format("auto", tokenizer': MODELS
    + 'schemas = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}]\n'
    + 'text = \'<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>\'\n',
    "def test_an_extreme_reward": "import torch, covey",
    'resolve_tools(["calculator", weather]': """
from covey.tool_calls import Call
from covey.agents.tools.toolset import resolve_tools
from covey.sandbox import Limits, Sandbox, choose
from covey.workers import WorkerPool
options, sandbox = {}, Sandbox(choose(), Limits())
def cut(text, limit):
    return text[:limit]
def weather(city: str) -> str:
    '''Tell the weather.

    Args:
        city: Its name.
    '''
    return f"{city}: rain"
""",
}


def run(text: str, names: dict[str, Any]) -> None:
    """As a script; `await` may stand outside of functions, as in a notebook."""
    code = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in PYTHON if b.excuse is None])
def test_a_block_runs(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"loop.total_steps": 1, "data.train_batch_size": 2, "eval.before": False, "eval.after": False}
    monkeypatch.setattr(covey, "train", partial(covey.train, **small))
    monkeypatch.setattr(covey.trl, "GRPOConfig", partial(covey.trl.GRPOConfig, max_steps=1))
    before = "".join(given for line, given in GIVEN.items() if line in block.text)
    module = ModuleType("block")
    monkeypatch.setitem(sys.modules, "block", module)  # dataclasses ask for it
    run(f"{before}\n{block.text}", vars(module))


def test_what_is_given_is_needed() -> None:
    assert [line for line in GIVEN if not any(line in block.text for block in PYTHON)] == []


def test_the_program_of_a_gateway_run(place: Path) -> None:
    """docs/gateway.md shows one, which scores with a function of its own."""
    (block,) = (block for block in PYTHON if 'os.environ["COVEY_EPISODE_URL"] + "/reward"' in block.text)
    Path("my_agent.py").write_text(f"def my_score(text):\n    return len(text) / 10\n\n{block.text}")
    words = ["agent=gateway", "agent.command=python my_agent.py", "reward=given", "data=sort", "rollout.group_size=2"]
    assert main(["train", *scaled([*words, "data.train_batch_size=1", "logging.output_dir=played"])]) == 0
    (metrics,) = Path("played").glob("*/*/metrics.jsonl")
    (step,) = (json.loads(line)["metrics"] for line in metrics.read_text().splitlines())
    assert step["episodes/failed"] == 0 and step["reward/mean"] > 0
