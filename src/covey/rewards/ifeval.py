"""The `ifeval` and `ifeval_composite` rewards: following instructions that a program can verify.

Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Strict scores judge the reply as it is. Loose scores accept an
instruction if it is followed in the reply or in a variant: without the first line, without the last, without both, and
each of these without stars.

`ifeval_composite` is TorchRL's training reward, which also pays for the format, from 0 to 2.2:

    0.4·prompt_strict + 0.3·instruction_strict + 0.2·prompt_loose + 0.1·instruction_loose
      + 0.5·[one <think>…</think>] + 0.5·[one <answer>…</answer>] + 0.2·[the model ended the reply itself]

Only the text in the first <answer>…</answer> is judged; without it nothing is followed.

Deviations from the published program, which uses NLTK: sentences end in `.`, `!`, `?` or `…` (with closing quotes and
brackets) before a space, with short lists of abbreviations and of words that often start a sentence in place of the
trained Punkt model; tokens, for counting words in capitals, are split at spaces, punctuation and contractions like
Treebank's; keywords are plain text, never patterns; language detection is seeded.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.errors import Absent, InputError, unknown
from covey.imports import install_extra
from covey.rewards.function import inline, reward
from covey.types import Episode, StopReason, Task

WORD = re.compile(r"\w+")
# Possessive, so a long run of marks is scanned once.
END = re.compile(r"""(?:(?<![.!?])(?:\.*+[!?][.!?]*+|\.++)|…)["'”’)\]*_]*+(?=\s|$)""")
FOLLOWING = re.compile(r"""[\s"'“‘(*_[]*([\w]+|\S)""")
ABBREVIATIONS = frozenset(
    [
        *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "inc", "ltd", "co", "corp", "gen", "col", "capt"),
        *("lt", "sgt", "rev", "hon", "gov", "sen", "rep", "pres", "e.g", "i.e", "cf", "al", "approx", "fig", "dept"),
        *("est", "jan", "feb", "mar", "apr", "aug", "sept", "oct", "nov", "dec", "ave", "blvd", "mt", "maj", "u.s"),
        *("u.k", "a.m", "p.m", "d.c", "ph.d", "pp", "op", "adm", "messrs", "bros", "univ", "assn", "comdr"),
    ]
)
LONGEST_WORD = 100  # characters searched for the word before a full stop
STARTERS = frozenset(
    [
        *("the", "this", "that", "these", "those", "it", "he", "she", "they", "we", "you", "i", "there", "here", "in"),
        *("on", "at", "after", "before", "but", "and", "if", "when", "while", "however", "what", "who", "why", "how"),
        *("a", "an", "as", "for", "from", "its", "his", "her", "their", "our", "my", "your", "please", "then", "so"),
    ]
)
TOKEN = re.compile(r"(?:[A-Za-z]\.){2,}(?!\w)|[^\W_](?:[\w./'’-]*\w)?|[^\s\w]+|_+")  # U.S., well-known, 3.5
CONTRACTION = re.compile(r"(?<=\w)(?=n['’]t$)|(?<=\w)(?=['’](?:s|m|d|ll|re|ve)$)|(?<=^can)(?=not$)", re.IGNORECASE)


# -- Counting ----------------------------------------------------------------------------------------------------------


def count_words(text: str) -> int:
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """The number of sentences, including text after the last sentence end."""
    count, start, searched, has_word = 0, 0, 0, False
    for end in END.finditer(text):
        # Each part is searched once: there may be long runs of full stops without a word between them.
        has_word = has_word or WORD.search(text, searched, end.end()) is not None
        searched = end.end()
        if has_word and _ends_sentence(text, start, end):
            count, start, has_word = count + 1, end.end(), False
    return count + bool(text[start:].strip())


def _ends_sentence(text: str, start: int, end: re.Match[str]) -> bool:
    following = FOLLOWING.match(text, end.end())
    if "!" in end[0] or "?" in end[0] or following is None:
        return True
    lower_next = following[1][0].islower()
    if end[0].startswith(("..", "…")):
        return not lower_next
    before = text[max(start, end.start() - LONGEST_WORD) : end.start()].split()
    last = before[-1].lstrip("\"'“(*[").lower() if before else ""
    if last.isdigit():  # the number of a list item
        return not lower_next
    if last in ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i"):
        return not lower_next and following[1].lower() in STARTERS
    return True


def capital_words(text: str) -> int:
    """Tokens with a capital and without a small letter. DON'T is two tokens, as in Treebank."""
    return sum(part.isupper() for token in TOKEN.findall(text) for part in CONTRACTION.split(token))


# -- The 25 instructions of IFEval: functions of the reply and the instruction's settings, which name the parameters ---

DETECTING = frozenset({"language:response_language", "change_case:english_capital", "change_case:english_lowercase"})
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")


def _compare(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation must be `less than` or `at least`, got {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def _in_language(text: str, language: str) -> bool:
    """Text without a language (numbers, symbols) passes."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


def existence(text: str, keywords: list[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(count_words(text), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs separated by ***. The first and the last may be empty, and then do not count."""
    parts = _without_empty_ends(re.split(r"\s?\*\*\*\s?", text))
    return len(parts) == num_paragraphs and all(part.strip() for part in parts)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs separated by an empty line. The word ends at its first punctuation mark."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    words = parts[nth_paragraph - 1].split() if nth_paragraph <= count else []
    word = re.split("[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0] if words else ""
    return count == num_paragraphs and bool(words) and word.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """[…] on one line, up to the first closing bracket."""
    count = 0
    for line in text.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
    return count >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(spaced.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that start with `-` or with a single star."""
    starts = [line.lstrip() for line in text.split("\n")]
    return sum(s.startswith("-") or (s[:1] == "*" and s[1:2] not in ("*", "")) for s in starts) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """*…* or **…** on one line with something inside."""
    single = [one for one in re.findall(r"\*[^\n*]*\*", text) if one.strip("*").strip()]
    double = [one for one in re.findall(r"\*\*([^\n*]*)\*\*", text) if one.strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    try:
        json.loads(FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """<<…>> on one line with something inside, from the first << to the last >>."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in _without_empty_ends(text.split("******"))]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def english_capital(text: str) -> bool:
    return text.isupper() and _in_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and _in_language(text, "en")


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(capital_words(text), capital_relation, capital_frequency)


def no_comma(text: str) -> bool:
    return "," not in text


def response_language(text: str, language: str) -> bool:
    return _in_language(text, language)


def _without_empty_ends(parts: list[str]) -> list[str]:
    start = 1 if not parts[0].strip() else 0
    end = len(parts) - 1 if len(parts) > 1 and not parts[-1].strip() else len(parts)
    return parts[start:end]


KINDS: dict[str, Callable[..., Any]] = {
    f"{group}:{check.__name__}": check
    for group, checks in {
        "keywords": (existence, frequency, forbidden_words, letter_frequency),
        "language": (response_language,),
        "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
        "detectable_content": (number_placeholders, postscript),
        "detectable_format": (
            *(number_bullet_lists, constrained_response, number_highlighted_sections),
            *(multiple_sections, json_format, title),
        ),
        "combination": (two_responses, repeat_prompt),
        "startend": (end_checker, quotation),
        "change_case": (capital_word_frequency, english_capital, english_lowercase),
        "punctuation": (no_comma,),
    }.items()
    for check in checks
}


# -- Rewards -----------------------------------------------------------------------------------------------------------

SCORES = ("instruction_strict", "instruction_loose", "prompt_strict", "prompt_loose")
WEIGHTED = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
Settings = Mapping[str, Any]


def _check(task: Task) -> None:
    """Every instruction is known, has the settings it needs, and can be judged on this machine."""
    kinds = list(task.columns["instruction_id_list"])
    settings = _settings(task.id, kinds, task.columns["kwargs"])
    if not kinds:
        raise InputError(f"{task.where}: instruction_id_list is empty, there is nothing to follow")
    for kind, values in zip(kinds, settings, strict=True):
        if kind not in KINDS:
            raise InputError(f"{task.where}: {unknown('instruction of IFEval', kind, KINDS)}")
        needed = list(inspect.signature(KINDS[kind]).parameters)[1:]
        if sorted(needed) != sorted(values):
            expected, actual = ", ".join(needed) or "nothing", ", ".join(values) or "nothing"
            raise InputError(f"{task.where}: kwargs of {kind} must give {expected}; they give {actual}")
    if (detecting := DETECTING & set(kinds)) and importlib.util.find_spec("langdetect") is None:
        raise Absent(
            f"reward ifeval: {task.where} asks for a language ({min(detecting)}), which needs the package langdetect\n"
            f"  fix: {install_extra('ifeval')}"
        )


@inline
@reward(check=_check)
def ifeval(
    final_answer: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Settings],
    task: Task,
    score: str = "instruction_strict",
) -> dict[str, float]:
    """The strict share of instructions followed. `score` selects another of the four scores, all of which are extras:
    instruction_strict, instruction_loose (shares), prompt_strict, prompt_loose (all or nothing)."""
    if score not in SCORES:
        raise ValueError(f"ifeval: score is one of {', '.join(SCORES)}, not {score!r}")
    scores = four_scores(final_answer, instruction_id_list, _settings(task.id, instruction_id_list, kwargs))
    return {"reward": scores[score], **scores}


@inline
@reward(check=_check)
def ifeval_composite(
    final_answer: str,
    episode: Episode,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Settings],
    task: Task,
    weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
) -> dict[str, float]:
    """TorchRL's training reward, 0 to 2.2; see the formula at the top of this file. `weights` are for prompt_strict,
    instruction_strict, prompt_loose and instruction_loose. Extras: the four scores, structure, complete."""
    if len(weights) != len(WEIGHTED):
        raise ValueError(f"ifeval_composite: weights are {len(WEIGHTED)} numbers, for {', '.join(WEIGHTED)}")
    thoughts, answers = (_inside(final_answer, tag) for tag in ("think", "answer"))
    judged = answers[0] if answers else ""
    scores = four_scores(judged, instruction_id_list, _settings(task.id, instruction_id_list, kwargs))
    followed = sum(weight * scores[name] for weight, name in zip(weights, WEIGHTED, strict=True))
    structure = 0.5 * (len(thoughts) == 1) + 0.5 * (len(answers) == 1)
    complete = float(bool(episode.turns) and episode.turns[-1].stop == StopReason.EOS)
    return {"reward": followed + structure + 0.2 * complete, **scores, "structure": structure, "complete": complete}


def _inside(text: str, tag: str) -> list[str]:
    """The text between each <tag> and the next </tag>; an unclosed tag ends the search."""
    texts, at = [], 0
    while (start := text.find(f"<{tag}>", at)) >= 0 and (end := text.find(f"</{tag}>", start)) >= 0:
        texts.append(text[start + len(tag) + 2 : end])
        at = end + len(tag) + 3
    return texts


def four_scores(text: str, kinds: Sequence[str], settings: Sequence[Settings]) -> dict[str, float]:
    pairs = list(zip(kinds, settings, strict=True))
    strict = [_follows(text, kind, values) for kind, values in pairs]
    variants = loose_variants(text)
    loose = [any(_follows(one, kind, values) for one in variants) for kind, values in pairs]
    return {
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
    }


def loose_variants(reply: str) -> list[str]:
    """The reply, without its first line, its last line, both; and each of these without stars."""
    lines = reply.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys(text for one in (reply, *cut) for text in (one, one.replace("*", ""))))


def _follows(text: str, kind: str, settings: Settings) -> bool:
    return bool(text.strip()) and bool(KINDS[kind](text, **settings))


def _settings(task_id: str, kinds: Sequence[str], kwargs: Any) -> list[Settings]:
    """The settings of each instruction. Nulls are dropped: tables give every row the columns of all kinds."""
    if len(kinds) != len(kwargs):
        raise InputError(f"task {task_id}: {len(kinds)} instructions in instruction_id_list, {len(kwargs)} in kwargs")
    return [{name: value for name, value in (one or {}).items() if value is not None} for one in kwargs]
