"""Keys, tokens and passwords do not belong into logs, run folders and pages: here they are taken out, for all of Covey.

Known secrets are the values of variables of the environment whose names say so (WANDB_API_KEY, HF_TOKEN, ...), the
passwords in addresses, and settings that are called api_key, token and the like. They are hidden wherever they turn up.
Text for people also loses what looks like a secret: headers, keys of well-known forms, users in addresses, addresses
of webhooks.

    hide            text for people: messages, tracebacks, notes
    hide_known      records, whose words are a model's: only what is known
    hide_settings   a tree of settings            hide_words   the words of a command line
    learn           settings that hold secrets are known from now on
    missing         settings whose secret was hidden when they were written down
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "<hidden>"
SHORTEST = 6  # characters; shorter words are in every text
NOT_SECRET = frozenset({"true", "false", "token", "none", "null", "disabled", "offline", "online"})

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SAYS = frozenset({"authorization", "bearer", "credential", "credentials", "pwd", "webhook"})
# Also at the end of a word: PGPASSWORD.
_SAYS_LAST = ("accesskey", "apikey", "passphrase", "passwd", "password", "privatekey", "secret", "secretkey")
_MAY_SAY = frozenset({"auth", "key", "pat", "token"})  # alone, in the environment, or after one of `_OF`
_MAY_SAY_LAST = frozenset({"pass", "sk"})  # only as the last word (not PASS_RATE), and with more words before it
_OF = frozenset({"access", "api", "auth", "bot", "client", "hf", "openai", "private", "refresh", "session", "wandb"})
_OF_PASS = _OF | {"db", "mail", "proxy", "root", "smtp", "ssh", "user"}
_JOINED = re.compile(r"[A-Z]{2,}(?:TOKEN|(?<!BY|ER)(?<!COM|SUR)PASS)\d*")  # in the environment: SSHPASS, not BYPASS
FROM_ENV = "_from_env"  # below such a setting there are names of variables, not what they hold
_NAMES = frozenset({"env", "file", "path", "dir", "name", "mode", "sock", "id", "socket"})  # where it is, not what
_ESCAPE = re.compile(r"%[0-9A-F]{2}")
# What stands in front of a colon is looked at from its first letter only: it may be a megabyte.
_ADDRESS = re.compile(r"(?P<scheme>(?<![a-z0-9+.-])[a-z0-9+.-]++://)(?P<user>[^\s/?#@'\"]*)@", re.IGNORECASE)
_QUERY = re.compile(r"([?&](?:api_?key|key|access_token|token|password|secret|sig|signature)=)[^&\s'\"#]+", re.I)
_HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)(?=\S*[0-9=._~+/-])[A-Za-z0-9._~+/=:-]{6,}")
_AUTHORIZATION = re.compile(
    r"""(authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s"',}]{6,}""", re.IGNORECASE
)
_FIELD = re.compile(r"""((?:x-)?api[-_]?key["']?\s*[:=]\s*["']?)[^\s"',}&]{6,}""", re.IGNORECASE)
_FORMS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|ck-[\w-]{32}|xox[abp]-[\w-]{10,})"
)

_WEBHOOK = re.compile(
    r"""(https?://(?:hooks?\.[^\s/'"<>]{1,200}|[^\s/'"<>]{1,200}\.webhook\.office\.com|api\.telegram\.org(?=/bot)"""
    r"""|[^\s:/'"<>]{1,200}(?::\d+)?(?:/[\w.-]{1,40}){0,6}?/(?:web)?hooks?"""
    r"""(?=/(?:[\w.~%@-]{1,15}/){0,4}(?=[\w.~%@-]{0,200}\d)[\w.~%@-]{16}))/)[^\s'"<>]+""",
    re.IGNORECASE,
)

_learned: set[str] = set()


def hide(text: str) -> str:
    text = hide_known(text)
    text = hide_users(text)
    for pattern in (_WEBHOOK, _QUERY, _HEADER, _AUTHORIZATION, _FIELD):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return _FORMS.sub(MASK, text)


def hide_known(text: str) -> str:
    pattern = _pattern(frozenset(known()))
    return text if pattern is None else pattern.sub(MASK, text)


def hide_settings(tree: Any, name: str = "", text: Callable[[str], str] = hide) -> Any:
    """The same tree; what is called a secret is masked, and so is what looks like one."""
    if isinstance(tree, Mapping):
        plain = name.endswith(FROM_ENV)
        return {key: hide_settings(value, "" if plain else str(key), text) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hide_settings(value, name, text) for value in tree]
    if not isinstance(tree, str):
        return tree
    return MASK if tree and says_secret(name) else text(tree)


def without_secrets(tree: Any) -> Any:
    """The same whatever the keys and passwords in it are, and whatever this machine's environment holds."""
    return hide_settings(tree, text=hide_users)


def hide_users(text: str) -> str:
    """Addresses without who asks."""
    return _ADDRESS.sub(rf"\g<scheme>{MASK}@", text)


def missing(tree: Any, name: str = "") -> str | None:
    """The name of a setting that would have to be given again."""
    if isinstance(tree, Mapping):
        found = (missing(value, f"{name}.{key}" if name else str(key)) for key, value in tree.items())
        return next((one for one in found if one is not None), None)
    if isinstance(tree, list | tuple):
        return next((one for value in tree if (one := missing(value, name)) is not None), None)
    return name if isinstance(tree, str) and MASK in tree else None


def hide_words(words: Sequence[str]) -> list[str]:
    """`a.b.api_key=X` and what looks like a secret."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(f"{name}={MASK}" if equals and value and says_secret(name) else hide(word))
    return found


def learn(tree: Any, name: str = "") -> None:
    """Whatever these settings hold of secrets is known from now on."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            learn(value, "" if name.endswith(FROM_ENV) else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            learn(value, name)
    elif isinstance(tree, str) and tree != MASK:
        _learned.update(_secrets_of(name, tree))


@functools.lru_cache(maxsize=4096)
def says_secret(name: str) -> bool:
    """Whether a name says that its value is one: `judge.api_key`, `HF_TOKEN`, not `api_key_env` or `answer_key`."""
    above, _, last = name.rpartition(".")
    words = [word.lower() for word in _WORD.findall(last)]
    if not words or words[-1] in _NAMES or above.endswith(FROM_ENV):
        return False
    if not _SAYS.isdisjoint(words) or any(word.endswith(_SAYS_LAST) for word in words):
        return True
    sure = len(words) == 1 or last.isupper()
    final = next((word for word in reversed(words) if not word.isdecimal()), "")
    if final in _MAY_SAY_LAST and (sure or not _OF_PASS.isdisjoint(words)):
        return True
    if not _MAY_SAY.isdisjoint(words) and (sure or not _OF.isdisjoint(words[:-1])):
        return True
    return last.isupper() and _JOINED.search(last.rpartition("_")[2]) is not None


def known() -> Iterator[str]:
    for name, value in os.environ.items():
        yield from _secrets_of(name, value)
    yield from _learned


def _secrets_of(name: str, value: str) -> Iterator[str]:
    if "://" in value:
        for found in _ADDRESS.finditer(value):
            _, _, password = found["user"].partition(":")
            yield from (part for part in (found["user"], password) if len(part) >= SHORTEST)
        if "webhook" in name.lower() and says_secret(name):  # the address itself is the secret
            yield value
    elif says_secret(name) and len(value) >= SHORTEST and not _is_plain(value):
        yield value


def _is_plain(value: str) -> bool:
    """A word that turns up everywhere, a number, or the name of a file that holds the secret."""
    word = value.isalpha() and len(value) < 12
    return word or value.lower() in NOT_SECRET or value.isdecimal() or value.startswith(("/", "~", "."))


@functools.lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """In every form; the longest first, as one may hold another."""
    forms = {form for secret in secrets for form in _forms(secret)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _forms(secret: str) -> Iterator[str]:
    """As JSON, Python, an address, a page and base64 would write it."""
    yield from (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], html.escape(secret))
    for quoted in (quote(secret, safe=""), quote(secret, safe="/"), quote_plus(secret)):
        yield from (quoted, _ESCAPE.sub(lambda found: found[0].lower(), quoted))
    yield from _in_base64(secret.encode("utf-8", errors="surrogateescape"))
    yield secret.replace("\\", "\\\\").replace("'", "\\'")  # within a longer text that Python shows
    yield json.dumps(repr(secret)[1:-1])[1:-1]


def _in_base64(secret: bytes) -> Iterator[str]:
    """In whatever it may stand, such as `user:secret`: three bytes are four characters, so there are three ways. The
    characters at either end that depend on its neighbours are no part of a form."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + secret).decode()
        inner = encoded[-(-before * 8 // 6) : (before + len(secret)) * 8 // 6]
        yield from (inner, inner.replace("+", "-").replace("/", "_"))


class Screen:
    """A stream for people, without secrets that are known; otherwise as it was. What only looks like one stays: links
    and tokens of our own servers are printed to be used."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide_users(hide_known(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)
