"""Redacts API keys, tokens and passwords from logs, run folders and pages.

Known secrets are the values of environment variables and settings with a secret's name (WANDB_API_KEY, HF_TOKEN,
api_key, ...), and passwords in URLs. They are hidden everywhere. Text for people is also searched for patterns:
authorization headers, keys of well-known formats, credentials in URLs, webhook URLs.

    hide               text for people: messages, tracebacks, notes
    hide_known         records with a model's words: only known secrets
    hide_settings      a tree of settings
    hide_words         the words of a command line
    remember_secrets   adds the secrets of a tree of settings to the known ones
    hidden_setting     a setting whose secret was hidden when it was stored
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
SHORTEST = 6  # characters of a secret; shorter words occur in every text
NOT_SECRET = frozenset({"true", "false", "token", "none", "null", "disabled", "offline", "online"})

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset({"authorization", "bearer", "credential", "credentials", "pwd", "webhook"})
# Also as the end of a word: PGPASSWORD.
_SECRET_ENDINGS = ("accesskey", "apikey", "passphrase", "passwd", "password", "privatekey", "secret", "secretkey")
_MAYBE_SECRET = frozenset({"auth", "key", "pat", "token"})  # alone, in the environment, or after a qualifier
_MAYBE_SECRET_LAST = frozenset({"pass", "sk"})  # only as the last word (not PASS_RATE), and with more words before it
_QUALIFIERS = frozenset(
    {"access", "api", "auth", "bot", "client", "hf", "openai", "private", "refresh", "session", "wandb"}
)
_PASS_QUALIFIERS = _QUALIFIERS | {"db", "mail", "proxy", "root", "smtp", "ssh", "user"}
# In the environment: SSHPASS, not BYPASS.
_ENVIRONMENT_NAME = re.compile(r"[A-Z]{2,}(?:TOKEN|(?<!BY|ER)(?<!COM|SUR)PASS)\d*")
FROM_ENV = "_from_env"  # settings with this ending hold names of variables, not secrets
# The location of a secret, not the secret itself.
_LOCATION_WORDS = frozenset({"env", "file", "path", "dir", "name", "mode", "sock", "id", "socket"})
_ESCAPE = re.compile(r"%[0-9A-F]{2}")
# The scheme is matched from its first letter only, since the text before a colon may be a megabyte.
_ADDRESS = re.compile(r"(?P<scheme>(?<![a-z0-9+.-])[a-z0-9+.-]++://)(?P<user>[^\s/?#@'\"]*)@", re.IGNORECASE)
_QUERY = re.compile(r"([?&](?:api_?key|key|access_token|token|password|secret|sig|signature)=)[^&\s'\"#]+", re.I)
_HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)(?=\S*[0-9=._~+/-])[A-Za-z0-9._~+/=:-]{6,}")
_AUTHORIZATION = re.compile(
    r"""(authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s"',}]{6,}""", re.IGNORECASE
)
_FIELD = re.compile(r"""((?:x-)?api[-_]?key["']?\s*[:=]\s*["']?)[^\s"',}&]{6,}""", re.IGNORECASE)
_KEY_FORMATS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|ck-[\w-]{32}|xox[abp]-[\w-]{10,})"
)

_WEBHOOK = re.compile(
    r"""(https?://(?:hooks?\.[^\s/'"<>]{1,200}|[^\s/'"<>]{1,200}\.webhook\.office\.com|api\.telegram\.org(?=/bot)"""
    r"""|[^\s:/'"<>]{1,200}(?::\d+)?(?:/[\w.-]{1,40}){0,6}?/(?:web)?hooks?"""
    r"""(?=/(?:[\w.~%@-]{1,15}/){0,4}(?=[\w.~%@-]{0,200}\d)[\w.~%@-]{16}))/)[^\s'"<>]+""",
    re.IGNORECASE,
)

_remembered: set[str] = set()


def hide(text: str) -> str:
    text = hide_known(text)
    text = hide_credentials(text)
    for pattern in (_WEBHOOK, _QUERY, _HEADER, _AUTHORIZATION, _FIELD):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return _KEY_FORMATS.sub(MASK, text)


def hide_known(text: str) -> str:
    pattern = _pattern(frozenset(known_secrets()))
    return text if pattern is None else pattern.sub(MASK, text)


def hide_settings(tree: Any, name: str = "", text: Callable[[str], str] = hide) -> Any:
    """The tree with masked secrets, found by their names and by patterns."""
    if isinstance(tree, Mapping):
        plain = name.endswith(FROM_ENV)
        return {key: hide_settings(value, "" if plain else str(key), text) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hide_settings(value, name, text) for value in tree]
    if not isinstance(tree, str):
        return tree
    return MASK if tree and is_secret_name(name) else text(tree)


def without_secrets(tree: Any) -> Any:
    """The tree with masked secrets, independent of this machine's environment."""
    return hide_settings(tree, text=hide_credentials)


def hide_credentials(text: str) -> str:
    """Hide user names and passwords in URLs."""
    return _ADDRESS.sub(rf"\g<scheme>{MASK}@", text)


def hidden_setting(tree: Any, name: str = "") -> str | None:
    """The first setting with a hidden secret, which must be given again; None if there is none."""
    if isinstance(tree, Mapping):
        found = (hidden_setting(value, f"{name}.{key}" if name else str(key)) for key, value in tree.items())
        return next((one for one in found if one is not None), None)
    if isinstance(tree, list | tuple):
        return next((one for value in tree if (one := hidden_setting(value, name)) is not None), None)
    return name if isinstance(tree, str) and MASK in tree else None


def hide_words(words: Sequence[str]) -> list[str]:
    """Hide secrets in words of a command line, such as `a.b.api_key=X`."""
    hidden = []
    for word in words:
        name, equals, value = word.partition("=")
        hidden.append(f"{name}={MASK}" if equals and value and is_secret_name(name) else hide(word))
    return hidden


def remember_secrets(tree: Any, name: str = "") -> None:
    """Add the secrets in these settings to the known ones."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            remember_secrets(value, "" if name.endswith(FROM_ENV) else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            remember_secrets(value, name)
    elif isinstance(tree, str) and tree != MASK:
        _remembered.update(_secrets_of(name, tree))


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether the value of this name is a secret: `judge.api_key`, `HF_TOKEN`, not `api_key_env` or `answer_key`."""
    above, _, last = name.rpartition(".")
    words = [word.lower() for word in _WORD.findall(last)]
    if not words or words[-1] in _LOCATION_WORDS or above.endswith(FROM_ENV):
        return False
    if not _SECRET_WORDS.isdisjoint(words) or any(word.endswith(_SECRET_ENDINGS) for word in words):
        return True
    sure = len(words) == 1 or last.isupper()
    final = next((word for word in reversed(words) if not word.isdecimal()), "")
    if final in _MAYBE_SECRET_LAST and (sure or not _PASS_QUALIFIERS.isdisjoint(words)):
        return True
    if not _MAYBE_SECRET.isdisjoint(words) and (sure or not _QUALIFIERS.isdisjoint(words[:-1])):
        return True
    return last.isupper() and _ENVIRONMENT_NAME.search(last.rpartition("_")[2]) is not None


def known_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        yield from _secrets_of(name, value)
    yield from _remembered


def _secrets_of(name: str, value: str) -> Iterator[str]:
    if "://" in value:
        for found in _ADDRESS.finditer(value):
            _, _, password = found["user"].partition(":")
            yield from (part for part in (found["user"], password) if len(part) >= SHORTEST)
        if "webhook" in name.lower() and is_secret_name(name):  # the URL itself is the secret
            yield value
    elif is_secret_name(name) and len(value) >= SHORTEST and not _is_common(value):
        yield value


def _is_common(value: str) -> bool:
    """Whether a value is a common word, a number, or the path of a file with the secret."""
    word = value.isalpha() and len(value) < 12
    return word or value.lower() in NOT_SECRET or value.isdecimal() or value.startswith(("/", "~", "."))


@functools.lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Matches all encodings of the secrets, the longest first, since one may contain another."""
    forms = {form for secret in secrets for form in _encodings(secret)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _encodings(secret: str) -> Iterator[str]:
    """The secret as written in JSON, Python, URLs, HTML and base64."""
    yield from (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], html.escape(secret))
    for quoted in (quote(secret, safe=""), quote(secret, safe="/"), quote_plus(secret)):
        yield from (quoted, _ESCAPE.sub(lambda found: found[0].lower(), quoted))
    yield from _base64_encodings(secret.encode("utf-8", errors="surrogateescape"))
    yield secret.replace("\\", "\\\\").replace("'", "\\'")  # inside the repr of a longer text
    yield json.dumps(repr(secret)[1:-1])[1:-1]


def _base64_encodings(secret: bytes) -> Iterator[str]:
    """Inside any longer text, such as `user:secret`. Three bytes are four characters, so there are three alignments.
    Characters at the ends that depend on neighbouring bytes are cut off."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + secret).decode()
        inner = encoded[-(-before * 8 // 6) : (before + len(secret)) * 8 // 6]
        yield from (inner, inner.replace("+", "-").replace("/", "_"))


class RedactedStream:
    """A text stream that hides known secrets. Patterns are not hidden: links and tokens of our own servers are printed
    to be used."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide_credentials(hide_known(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)
