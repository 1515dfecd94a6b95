"""Mutation testing: change one operator, constant or statement at a time and see whether a test fails.

    .venv/bin/python benchmarks/mutants.py --sample 5 [--seed 0] [--files algorithms/gae.py rollout/asynchronous.py]

Mutants of the algorithms, the rollout pipeline, the embedded engine (without the files that need a GPU) and the
learner's packing: a comparison is changed, + and -, * and /, `and` and `or` are exchanged, an integer is changed by
one, `not` is dropped, a condition is made constant, a call or an augmented assignment that is a statement is deleted,
or a function that may return None returns None. --sample mutants of each file are drawn with --seed; without it, all.

Each mutant is written into a copy of the package in a temporary folder, and the tests of its module run with `-x` in
a fork of this process, which has imported torch, transformers and pytest but not Covey. A mutant survives if they
pass; a failed test, an error and a hang (--timeout) kill it. The unchanged package is tested first and must pass.
Each survivor is printed with its location and change, then a table of the files; after Ctrl-C, of those that are
done. Exit status 1: tests fail without a change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "covey"
GPU_ONLY = {f"rollout/embedded/{name}.py" for name in ("kernels", "graphs")}
FOLDERS = ("algorithms", "rollout", "rollout/embedded")
SINGLE = ("learner/packing.py", "streams.py", "memory.py", "app/checks.py")
HEAVY = ("torch", "transformers.models.llama.modeling_llama", "tokenizers", "hypothesis", "pytest")  # not Covey

ENGINE = ("test_engine", "test_conversations", "test_cache_size")
# Where a module's mutants are most likely found; all other tests of tests/algorithms follow.
FIRST = {
    **dict.fromkeys(("assemble", "likelihood"), "test_algorithm"),
    **dict.fromkeys(("cispo", "gspo", "policy_gradient", "ppo_clip", "sapo"), "test_losses"),
    **dict.fromkeys(("gpg", "grpo_passk", "opo", "remax", "rloo"), "test_estimators"),
    **dict.fromkeys(("gae", "reinforce_plus_plus"), "test_token_estimators"),
}
# The tests of a module, quickest first.
TESTS: dict[str, Sequence[str]] = {
    "app/checks.py": ("test_choose",),
    "rollout/asynchronous.py": (
        "test_asynchronous",
        "test_collector",
        "../training/test_checkpoint",
    ),
    "rollout/collector.py": ("test_collector", "test_asynchronous", "test_conversations"),
    "rollout/policy.py": ("test_policy", "test_conversations", "test_engine"),
    "rollout/rendering.py": ("test_rendering", "test_rewriting_templates", "test_demonstrated", "test_conversations"),
    "streams.py": ("../test_streams", "test_sampling", "test_policy", "test_collector"),
    "memory.py": ("test_cache_size",),
    "rollout/embedded/attention.py": ("test_families", "test_engine"),
    "rollout/embedded/allocation.py": ("test_block_manager", "test_row_manager", "test_cache_size", *ENGINE),
    "rollout/embedded/cache.py": ("test_row_manager", *ENGINE, "test_families"),
    "rollout/embedded/engine.py": ENGINE,
    "rollout/embedded/gpu_batch.py": ("test_block_manager", "test_cache_size", "test_cache"),
    "rollout/embedded/runner.py": ("test_sampling", *ENGINE),
    "rollout/embedded/scheduler.py": ("test_scheduler", *ENGINE),
    "rollout/embedded/cpu_batch.py": ("test_packed_linears", "test_row_manager", *ENGINE),
    "learner/packing.py": ("test_packing",),
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
Constants = tuple[str, ...]
LARGEST_CONSTANT = 16  # larger ones are seeds and sizes


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/covey
    line: int
    before: str
    after: str
    source: str  # of the whole file


# -- making mutants ----------------------------------------------------------------------------------------------------


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """The mutants of a file. Each changes one node and leaves the rest of the text unchanged."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for text in lines:
        starts.append(starts[-1] + len(text))
    whole = b"".join(lines)
    for node, constants in code_nodes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = whole[begin:end].decode()
        for after in (*changes(node), *constants):
            changed = (whole[:begin] + after.encode() + whole[end:]).decode()
            yield Mutant(file, node.lineno, " ".join(before.split()), after, changed)


def code_nodes(tree: ast.AST, optional: bool = False) -> Iterator[tuple[ast.expr | ast.stmt, Constants]]:
    """Expressions and statements, without annotations, f-strings (messages), asserts and errors, and the constants that
    may replace each. `optional`: inside of a function that may return None."""
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        optional = "None" in ast.unparse(getattr(tree, "returns", None) or ast.Pass())
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr | ast.Assert | ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr | ast.stmt):
                yield child, () if isinstance(child, ast.Constant) else constants_for(tree, name, optional)
            if isinstance(child, ast.AST):
                yield from code_nodes(child, optional)


def constants_for(parent: ast.AST, name: str, optional: bool) -> Constants:
    if isinstance(parent, ast.If | ast.IfExp) and name == "test":
        return ("True", "False")
    if isinstance(parent, ast.While) and name == "test":
        return ("False",)  # True only hangs
    return ("None",) if isinstance(parent, ast.Return) and optional else ()


def changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Source texts that may replace the node."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare):
        changed.ops[0] = COMPARISONS[type(changed.ops[0])]()
        yield f"({ast.unparse(changed)})"
    elif isinstance(changed, ast.BinOp | ast.AugAssign) and type(changed.op) in ARITHMETIC:
        changed.op = ARITHMETIC[type(changed.op)]()
        yield f"({ast.unparse(changed)})" if isinstance(changed, ast.BinOp) else ast.unparse(changed)
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.And() if isinstance(changed.op, ast.Or) else ast.Or()
        yield f"({ast.unparse(changed)})"
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield f"({ast.unparse(changed.operand)})"
    elif isinstance(changed, ast.Constant) and type(changed.value) is int and changed.value <= LARGEST_CONSTANT:
        yield from (str(changed.value + 1), f"({changed.value - 1})")
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)):
        yield "pass"


# -- running tests -----------------------------------------------------------------------------------------------------


def test_files(file: str) -> list[str]:
    package = file.split("/")[0]
    if file in TESTS:
        return [os.path.normpath(f"tests/{package}/{name}.py") for name in TESTS[file]]
    module = Path(file).stem
    return [f"tests/{package}/{FIRST.get(module, f'test_{module}')}.py", f"tests/{package}"]


def passes(scratch: Path, file: str, source: str, timeout: float) -> bool:
    """Replace the source of a file and run its tests, in a fork."""
    path = scratch / "covey" / file
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # a change may keep size and time
    child = os.fork()
    if child == 0:
        os.setsid()  # to kill a hanging test together with its child processes
        os._exit(run_tests(scratch, test_files(file)))
    end, ended = time.monotonic() + timeout, (0, 0)
    try:
        while not ended[0] and time.monotonic() < end:
            time.sleep(0.02)
            ended = os.waitpid(child, os.WNOHANG)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if not ended[0]:
        os.waitpid(child, 0)
    return ended[0] != 0 and os.waitstatus_to_exitcode(ended[1]) == 0


def run_tests(scratch: Path, files: Sequence[str]) -> int:
    import pytest

    nowhere = os.open(scratch / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.path[:0] = [str(scratch), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(scratch), str(ROOT)])  # for processes that tests start
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    try:  # one after the other: pytest would sort a file into the order of its folder
        return next((int(code) for file in files if (code := pytest.main([*options, file]))), 0)
    except BaseException:
        traceback.print_exc()
        return 1


_passed: set[frozenset[str]] = set()  # the sets of tests that pass without a change


def unchanged_passes(scratch: Path, file: str, source: str, timeout: float) -> bool:
    tests = frozenset(TESTS.get(file, [f"tests/{file.split('/')[0]}"]))
    if tests not in _passed and passes(scratch, file, source, timeout):
        _passed.add(tests)
    return tests in _passed


def test_file(scratch: Path, file: str, asked: argparse.Namespace) -> tuple[int, int] | None:
    """Numbers of tested and surviving mutants; None if the tests fail without a change. Survivors are printed."""
    source = (PACKAGE / file).read_text()
    found = list(mutants_of(file, source))
    chosen = random.Random(f"{asked.seed} {file}").sample(found, min(asked.sample or len(found), len(found)))
    if chosen and not unchanged_passes(scratch, file, source, asked.timeout):
        return None
    survived = 0
    for one in sorted(chosen, key=lambda one: one.line):
        if passes(scratch, file, one.source, asked.timeout):
            survived += 1
            print(f"{file}:{one.line}  {one.before[:200]} → {' '.join(one.after.split())[:200]}", flush=True)
    (scratch / "covey" / file).write_text(source)
    return len(chosen), survived


def row(file: str, total: int, survived: int) -> str:
    score = f"{100 * (total - survived) / total:.0f} %" if total else "–"
    return f"| {file} | {total} | {total - survived} | {survived} | {score} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="mutants of each file; without it all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--files", nargs="*", help="below src/covey; without it all that are searched")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of the tests of one mutant")
    asked = parser.parse_args()
    listed = [f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("[a-z]*.py"))]
    files = asked.files or [file for file in [*listed, *SINGLE] if file not in GPU_ONLY]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in HEAVY:
        importlib.import_module(name)
    broken, rows = [], ["| file | mutants | killed | survived | score |", "|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        scratch = Path(folder)
        shutil.copytree(PACKAGE, scratch / "covey", ignore=shutil.ignore_patterns("__pycache__"))
        for file in files:
            counted = test_file(scratch, file, asked)
            if counted is None:
                broken.append(file)
            else:
                rows.append(row(file, *counted))
    print("\n".join(["", *rows]))
    for file in broken:
        print(f"\n{file}: its tests fail without a change")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
