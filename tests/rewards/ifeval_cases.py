"""Replies to each of the 25 kinds of instructions, judged by hand from the public definitions."""

from __future__ import annotations

from typing import Any

ENGLISH = "this is a plain english sentence about the weather in the mountains"
GERMAN = "dies ist ein einfacher deutscher Satz über das Wetter in den Bergen"
FRENCH = "ceci est une phrase française toute simple sur le temps dans les montagnes"
AT_LEAST, LESS = "at least", "less than"

# kind, settings, replies that follow it, replies that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["talk", "Night"]},
        ["We TALK at night.", "nightly talks"],
        ["We talk.", "nigh talk"],
    ),
    (
        "keywords:frequency",
        {"keyword": "cat ", "frequency": 2, "relation": AT_LEAST},
        ["Cat and cat", "catcat"],
        ["One cat", "c a t cat"],
    ),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": LESS}, ["a cat", "none"], ["cat cat"]),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["run", "c++"]},
        ["I was running", "brunch"],
        ["Run!", "they run"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": AT_LEAST},
        ["See me", "eEe"],
        ["See", ""],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": AT_LEAST},
        ["# Title"],
        ["Title"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": LESS},
        ["One. Two."],
        ["One. Two. Three.", "Is it? It is! So be it."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": AT_LEAST},
        ["One! Two", "It rains. It pours."],
        ["Mr. X came", "It rains and it pours."],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": AT_LEAST},
        ["one two three", "a-b c"],
        ["one two"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one two"], ["one two three"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a\n***\n***\nb", "a\n***\nb\n***\nc", "a\n\nb"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weather"},
        ["a\n\nweather, it is", 'a\n\n"Weather" is', "a\n\nWEATHER"],
        ["a\n\nthe weather", "a\n\nweather\n\nb", "weather", "a\n\nweathers", "\n\na\n\nweather"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] and [address]", "[[a] [b]"],
        ["[name]", "[a\nb] [c]", "a] [b]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "p. s. more", "so p.s. inline"],
        ["PS more", "P.S"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p. s"], ["P.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "text\n* a\n- b"],
        ["* a", "* a\n* b\n* c", "** a\n* b", "a\nb"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is maybe. So"],
        ["My answer is Yes.", "yes", "My answer is yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and **two**", "*one* and **two**"],
        ["*one*", "**one**", "* *one", "*one\ntwo* x", "plain"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2"],
        ["Section 1\na", "SECTION 1 SECTION 2", "Section one Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": [1, 2]}\n```', "```\n3\n```"],
        ["{a: 1}", 'Here: {"a": 1}', "[" * 20000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<A title>>\ntext", "so <<x>> there", "<<>> <<a>>"],
        ["<<>>", "<< >>", "<a title>", "<<a\ntitle>>", ">>a<<"],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******\none\n******\ntwo\n******"],
        ["one", "one\n******\none", "a\n******\nb\n******\nc", "a\n******\n******\nb"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem. "},
        ["write a poem.\n\nRoses", " Write a poem."],
        ["Sure! Write a poem.", "Write a pom."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions?"},
        ["So. Any other questions?", '"any other questions?"\n'],
        ["Any other questions? No", "Any questions?"],
    ),
    ("startend:quotation", {}, ['"All of it"', ' "a" and "b"\n'], ['"', "'a'", '"a" b', "a"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["I saw NASA", "WELL-KNOWN U.S. facts"],
        ["Only NASA here", "Not Any"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": LESS},
        ["NASA here"],
        ["NASA AND"],
    ),
    (
        "change_case:english_capital",
        {},
        [ENGLISH.upper(), "THE BUS LEAVES AT 7:30, SO PLEASE BE THERE IN TIME AND BRING YOUR TICKET!"],
        [ENGLISH, ENGLISH.upper() + " x", GERMAN.upper()],
    ),
    (
        "change_case:english_lowercase",
        {},
        [ENGLISH, "the bus leaves at 7:30, so please be there in time and bring your ticket!"],
        [ENGLISH.upper(), ENGLISH + " X", GERMAN.lower()],
    ),
    ("punctuation:no_comma", {}, ["a; b.", "1.000 、 2"], ["a, b", "1,000"]),
    ("language:response_language", {"language": "de"}, [GERMAN, "123"], [ENGLISH, FRENCH]),
    ("language:response_language", {"language": "fr"}, [FRENCH], [GERMAN]),
]
