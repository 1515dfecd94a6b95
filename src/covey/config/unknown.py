"""The error about a setting that does not exist, with what was probably meant."""

from __future__ import annotations

from covey.config.aliases import ACCEPTED, ALIASES, Target, spellings, translate
from covey.config.derive import PARTS
from covey.config.meanings import meant
from covey.config.not_yet import NOT_YET_KEYS
from covey.config.read import Given, literal
from covey.config.settings import Algorithms, algorithm_settings, all_keys, schema_settings, sections
from covey.errors import InputError
from covey.suggest import NEAR, TYPO, alike


def unknown_setting(given: Given, algorithm: str, algorithms: Algorithms) -> InputError:
    key = given.key
    algorithm = algorithm if algorithm in algorithms else next(iter(algorithms))
    if key in sections():
        return InputError(f"{given.place}{key} is a section, not a setting\n  {listing_of(key, algorithm)}")
    lines = [f"{given.place}unknown setting  {key}"]
    section = key.partition(".")[0]
    guesses = _guesses(key, algorithm, algorithms)
    for number, guess in enumerate(guesses):
        target = translate(guess, algorithms) or Target(guess)  # a section without a name stands for itself
        owner = target.algorithm or algorithm
        if not number:
            section, algorithm = target.key.partition(".")[0], owner
        head = "or            " if number else "did you mean  "
        end = "?" if number == len(guesses) - 1 else ""
        lines.append(f"  {head} {guess}{_meaning(guess, target, owner, algorithms, len(guesses) > 1)}{end}")
    lines.append(f"  {listing_of(section, algorithm)}")
    return InputError("\n".join(lines))


def _guesses(key: str, algorithm: str, algorithms: Algorithms) -> list[str]:
    """What was probably meant: a slip of the finger, unless the words mean something else; then by meaning; by letters
    last."""
    native = {**schema_settings(), **algorithm_settings(algorithm, algorithms)}
    head, _, last = key.rpartition(".")
    if table := alike(head, [name for name, setting in native.items() if setting.free], TYPO):
        return [f"{table}.{last}"]  # data.option.count
    typo = _by_letters(key, algorithm, algorithms, TYPO)
    found = meant(key, native)
    if typo is not None and (not found or _same(typo, found[0], head, algorithms)):
        return [typo]
    near = _by_letters(key, algorithm, algorithms, NEAR)
    return found or ([near] if near is not None else [])


def _same(typo: str, setting: str, head: str, algorithms: Algorithms) -> bool:
    """Whether a spelling in the user's own vocabulary, by the head of the key, stands for that setting."""
    target, theirs = translate(typo, algorithms), typo.rpartition(".")[0]
    return target is not None and target.key == setting and (theirs == head or bool(alike(head, [theirs], TYPO)))


def _by_letters(key: str, algorithm: str, algorithms: Algorithms, cutoff: float) -> str | None:
    """The nearest key whose last word is near too: long common beginnings alone would make anything look near."""
    last = key.rpartition(".")[2]
    native = {**schema_settings(), **algorithm_settings(algorithm, algorithms)}
    known = [*native, *ALIASES, *PARTS, *ACCEPTED, *sorted(NOT_YET_KEYS)]
    for name in algorithms:
        for setting in algorithm_settings(name, algorithms):
            known += [s for s in spellings(setting, algorithms) if s.startswith(f"algorithm.{name}_")]
    near = [k for k in dict.fromkeys(known) if alike(last, [k.rpartition(".")[2]], cutoff)]
    if "." in key:
        return alike(key, near, cutoff)
    if section := alike(key, sections(), cutoff):  # data=x is short for data.name=x
        return section
    return next((k for k in near if k.rpartition(".")[2] == key), alike(key, near, cutoff))


def _meaning(guess: str, target: Target, owner: str, algorithms: Algorithms, explained: bool) -> str:
    """`explained`: with the help text, so that several suggestions can be told apart."""
    settings = all_keys(algorithms) | algorithm_settings(owner, algorithms)
    words = []
    if guess != target.key:
        words.append(f"= {target.key}" + (f" for {target.algorithm}" if target.algorithm else ""))
    if target.key in settings:
        words.append(f"default {literal(settings[target.key].default)}")
        if explained:
            words.append(settings[target.key].explanation)
    return f"  ({'; '.join(words)})" if words else ""


def listing_of(section: str, algorithm: str) -> str:
    if section == "algorithm":
        return f"all settings of {algorithm}: covey config explain algorithm={algorithm}"
    if section in sections():
        return f"all settings of {section}: covey config explain {section}"
    return "all settings: covey config explain"
