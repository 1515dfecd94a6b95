"""Other people's checkers beside Covey's: IFEval's as lm-eval has it, the syntax trees of bfcl-eval.

Only their checking modules are loaded, under stand-ins for what these import and do not need here. Punkt, the trained
model that parts sentences, is downloaded data: where it is not here, the number of sentences is not compared, and words
in capitals are counted without parting sentences first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.rewards.bfcl import matches
from covey.rewards.ifeval import four_scores
from kit.perturb import gold_arguments, wrong_calls
from kit.scoring_checks import AST, LIVE, ROOT, Row, lines

SENTENCES = "length_constraints:number_sentences"


def agreement(data: Path, sample: int | None) -> Iterator[Row]:
    """Nothing where the other checkers are not installed (benchmarks/requirements-scoring.txt)."""
    if importlib.util.find_spec("lm_eval") and importlib.util.find_spec("nltk"):
        yield from _ifeval(data)
    if importlib.util.find_spec("bfcl_eval"):
        yield _bfcl(data)


def _stand_in(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


# -- IFEval ------------------------------------------------------------------------------------------------------------


def _their_kinds() -> dict[str, Any]:
    """Instruction kinds by name, without lm-eval's own start."""
    import langdetect
    import nltk

    langdetect.DetectorFactory.seed = 0
    folder = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0])  # type: ignore[union-attr,index]
    for name, place in {"lm_eval": folder, "lm_eval.tasks": folder / "tasks"}.items():
        _stand_in(name, __path__=[str(place)])
    nltk.download = lambda *_: False
    if not _punkt():
        whole = nltk.word_tokenize
        nltk.word_tokenize = lambda text: whole(text, preserve_line=True)
    return importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT


def _punkt() -> bool:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


def _ifeval(data: Path) -> Iterator[Row]:
    sys.path.insert(0, str(ROOT))
    from tests.rewards.ifeval_cases import CASES

    kinds = _their_kinds()
    hand = [(kind, settings, text) for kind, settings, right, wrong in CASES for text in (*right, *wrong)]
    rows = lines(data / "ifeval" / "input_data.jsonl")
    texts = _texts(data)
    draw = random.Random(0)
    real = [
        (kind, {k: v for k, v in given.items() if v is not None}, text)
        for row in rows
        for kind, given in zip(row["instruction_id_list"], row["kwargs"], strict=True)
        for text in (row["prompt"], *draw.sample(texts, 9))
    ]
    for what, cases in {"replies by hand": hand, "instructions of the public file, ten texts each": real}.items():
        todo = [case for case in cases if case[0] != SENTENCES or _punkt()]
        wrong = [
            f"{kind} {settings}: ours {ours}, theirs {theirs}: {text[:80]!r}"
            for kind, settings, text in todo
            if (ours := four_scores(text, [kind], [settings])["instruction_strict"] == 1)
            != (theirs := bool(text.strip()) and _theirs(kinds[kind](kind), settings, text))
        ]
        yield Row("IFEval", f"the verdict of lm-eval: {what}", len(todo), len(todo) - len(wrong), wrong)


def _theirs(instruction: Any, settings: dict[str, Any], text: str) -> bool | str:
    """Or why it stopped."""
    instruction.build_description(**settings)
    try:
        return bool(instruction.check_following(text))
    except (RecursionError, re.error) as error:
        return repr(error)


def _texts(data: Path) -> list[str]:
    """Solutions and prompts in many forms, so that most kinds of instructions are followed by some."""
    solutions = [row["answer"] for row in lines(data / "gsm8k" / "test.jsonl")[:300]]
    prompts = [row["prompt"] for row in lines(data / "ifeval" / "input_data.jsonl")[::3]]
    made = []
    for i, text in enumerate(solutions + prompts):
        parts = text.split("\n")
        forms = [
            *(
                text.upper(),
                text.lower(),
                f'"{text}"',
                text.replace(",", ""),
                f"<<Title>>\n\n{text}",
                f"{text}\n\nP.S. more",
            ),
            *("\n".join(f"* {part}" for part in parts), "\n***\n".join(parts), f"{text}\n******\n{text.lower()}"),
            *(" ".join(f"*{part}*" for part in parts), json.dumps({"a": text}), f"My answer is yes. {text}"),
            *(
                "\n".join(f"SECTION {k}\n{part}" for k, part in enumerate(parts)),
                " ".join(f"[{part}]" for part in parts),
            ),
        ]
        made += [text, forms[i % len(forms)]]
    return made


# -- BFCL --------------------------------------------------------------------------------------------------------------


def _bfcl(data: Path) -> Row:
    model = types.SimpleNamespace(underscore_to_dot=False)
    _stand_in("bfcl_eval.constants.model_config", MODEL_CONFIG_MAPPING={"any": model})
    for name in ("java", "js"):
        place = f"bfcl_eval.eval_checker.ast_eval.type_convertor.{name}_type_converter"
        _stand_in(place, **{f"{name}_type_converter": None})
    check = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").simple_function_checker
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    tried, wrong = Counter[bool](), []
    for category in (*AST, *LIVE):
        folder = data / "tools" / "bfcl"
        functions = {row["id"]: row["function"] for row in lines(folder / f"BFCL_v4_{category}.json")}
        for row in lines(folder / "possible_answer" / f"BFCL_v4_{category}.json"):
            described = {one["name"]: one for one in functions[row["id"]]}
            for one in row["ground_truth"]:
                ((name, values),) = one.items()
                schema = described[name]["parameters"]
                gold = [(name, gold_arguments(values, schema))]
                for calls in [gold, *(other for _, other in wrong_calls(gold, schema, values) if len(other) == 1)]:
                    ours = matches(calls[0], name, values, schema)
                    theirs = check(described[name], dict(calls), one, python, "any")["valid"]
                    tried[ours] += 1
                    if ours != theirs:
                        wrong.append(f"{row['id']}: ours {ours}, theirs {theirs}: {calls}")
    total = tried.total()
    return Row(
        "BFCL", f"the verdict of bfcl-eval on single calls ({tried[True]:,} right)", total, total - len(wrong), wrong
    )
