"""The 25 kinds of instructions that IFEval can verify, each a function of the reply and the instruction's settings.

Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Deviations: sentences and tokens are counted by `ifeval_text`;
keywords are plain text, never patterns; detecting a language is seeded, so that a reply is always judged the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from covey.rewards.ifeval_text import capital_words, count_sentences, count_words

DETECTING = frozenset({"language:response_language", "change_case:english_capital", "change_case:english_lowercase"})
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")


def _compare(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation must be `less than` or `at least`, got {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def _in_language(text: str, language: str) -> bool:
    """A text that has no language (numbers, signs) counts as right."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


# -- keywords ----------------------------------------------------------------------------------------------------------


def existence(text: str, keywords: list[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


# -- length ------------------------------------------------------------------------------------------------------------


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(count_words(text), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs parted by ***; only the first and the last may be empty, and then do not count."""
    parts = _without_empty_ends(re.split(r"\s?\*\*\*\s?", text))
    return len(parts) == num_paragraphs and all(part.strip() for part in parts)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs parted by an empty line. The word ends at its first punctuation mark."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    words = parts[nth_paragraph - 1].split() if nth_paragraph <= count else []
    word = re.split("[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0] if words else ""
    return count == num_paragraphs and bool(words) and word.lower() == first_word.lower()


# -- content and format ------------------------------------------------------------------------------------------------


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """[…] on one line; the first closing bracket ends it."""
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
    """Lines that start with `-`, or with one star."""
    starts = [line.lstrip() for line in text.split("\n")]
    return sum(s.startswith("-") or (s[:1] == "*" and s[1:2] not in ("*", "")) for s in starts) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """*…* or **…** on one line with something inside."""
    single = [found for found in re.findall(r"\*[^\n*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*([^\n*]*)\*\*", text) if found.strip()]
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
    """<<…>> on one line with something inside: from its first << to its last >>."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


# -- combination, start and end, case, punctuation, language ----------------------------------------------------------


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
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
