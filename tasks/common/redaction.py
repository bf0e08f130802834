"""Secrets leave no trace: text that is written down, shown or sent passes through here first. See docs/access.md.

A secret is: the value of an environment variable whose name says so, the platform's own logins, and what has the form of one
(keys of connection strings, signatures of SAS addresses, passwords in addresses, bearer tokens, private keys). What a file of
a dataset holds is not touched: data is data. Standard library only, for the small parent of tasks/common/process.py stands on it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tasks.common.home import home

MARK = "[redacted]"
SHORTEST = 8
"""Characters of a known secret: shorter values, `true` among them, are found in every text."""
CREDENTIALS = ("prefect/credentials", "platform/mlflow/secret")
"""Files of the home that hold a login or a key."""
NEVER_HANDED_ON = "HEADWAY_TOKEN"
"""A person's token is for the command that it was given to, and for no other process."""

_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_?STRING|AUTH_?STRING|CREDENTIAL|PRIVATE_?KEY|API_?KEY"
    r"|OTLP\w*HEADERS|(?:^|_)(?:KEYS?|SAS|PAT|COOKIE)(?:_|$)|(?:^|_)PASS$|_PWD$"
)
_ORDINARY = re.compile(r"[-+]?[\d.]+|(?i:true|false|yes|no|on|off|none|null)|")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_LOGIN = re.compile(r"[\w.-]{1,64}:([^/\s]\S*)")
_WORD = re.compile(r"[a-z_]{1,11}")
_LABELLED = (
    (r"(?i:(?:account|access|instrumentation|api|client|subscription)_?key=)", r"[^;&\s\"'<>\\]{8,}"),
    (r"(?i:sharedaccesssignature=)", r"[^;\s\"'<>\\]{8,}"),
    (r"(?<![A-Za-z])sig=", r"[A-Za-z0-9%+/=_-]{16,}"),
    (
        r"(?i:(?:password|passwd|pwd|secret|access_?token|refresh_?token)[\"']?(?:=|:\s*(?=[\"']))[\"']?)",
        r"[^;&\s\"'<>\\,)]{6,}",
    ),
    (r"://[^\s/:@\"'<>]{0,128}:", r"[^\s/@\"'<>]+(?=@)"),
    (r"(?i:bearer\s+)", r"[A-Za-z0-9._~+/=-]{16,}"),
    (r"(?i:authorization[\"']?\s*[:=]\s*[\"']?basic\s+)", r"[A-Za-z0-9+/=]{8,}"),
)
"""What stands before a secret and is kept, and the secret."""
_BARE = (
    r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    r"\bhwt_[\w-]{20,}",
    r"\b(?:gh[pousr]_|github_pat_|hf_)[A-Za-z0-9_]{20,}",
    r"(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
)
_FORMS = "|".join([*(f"({label}){secret}" for label, secret in _LABELLED), *_BARE])
_FORM = re.compile(_FORMS)
_TRACES = (
    "key=", "sig=", "signature=", "passw", "pwd", "secret", "access_token", "accesstoken", "refresh_token", "refreshtoken",
    "bearer", "basic", "eyj", "hwt_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "key-----",
)  # fmt: skip
"""What every text with such a form has in it, in lower case; looking for these is fifty times faster than for the forms."""


def redact(text: str) -> str:
    """The text with every secret in it replaced by a mark; what names it (`AccountKey=`) stays."""
    return _known().clean(text)


def has_form_of_secret(text: str) -> bool:
    """Whether a text holds what looks like a secret wherever it stands: the environment of this process has no say."""
    return _has_a_form(text) and bool(_FORM.search(text))


def redact_value(value: Any) -> Any:
    """A value of the same shape, dicts, lists and tuples in each other, with every text in it redacted."""
    return _clean(value, _known())


def redacted(error: BaseException) -> BaseException:
    """The same error, and all that led to it, without secrets in its text; a RuntimeError where its text is out of reach."""
    linked: dict[int, BaseException] = {}
    queue: list[BaseException] = [error]
    while queue:
        one = queue.pop()
        if id(one) not in linked:
            linked[id(one)] = one
            one.args = redact_value(one.args)
            vars(one).update(redact_value(vars(one)))
            if isinstance(one, OSError):
                one.filename, one.filename2 = redact_value((one.filename, one.filename2))
            queue += [other for other in (one.__cause__, one.__context__, *_inner(one).values()) if other]
    for one in linked.values():
        vars(one).update({name: _readable(inner) for name, inner in _inner(one).items()})
    return _readable(error)


def without_secrets(environment: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """An environment for another process: only those variables with a secret in them whose name fits a pattern of `keep`."""

    def handed_on(name: str, value: str) -> bool:
        kept = any(fnmatchcase(name, pattern) for pattern in keep)
        return name != NEVER_HANDED_ON and (kept or not (_named_secret(name, value) or _FORM.search(value)))

    return {name: value for name, value in environment.items() if handed_on(name, value)}


def secret_settings(settings: Mapping[str, Any]) -> list[str]:
    """Dotted names of the settings that hold a secret."""
    return [name for name, text in _leaves("", settings) if redact(text) != text]


def require_no_secrets(settings: Mapping[str, Any]) -> None:
    """Raise ValueError when a setting holds a secret: settings are written into lineage, reports and Prefect's database."""
    result = secret_settings(settings)
    if result:
        raise ValueError(
            f"{', '.join(result)}: the value is a secret, or holds one. Settings are kept in lineage, reports and Prefect's "
            f"page, where many people read them: leave the secret in the environment, and out of the configuration"
        )


def clean_logs() -> None:
    """Redact every log record of this process when it is made, whatever logger, handler and formatter it meets."""
    import logging

    made = logging.getLogRecordFactory()
    if getattr(made, "redacts", False):
        return

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made(*args, **kwargs)
        _clean_record(record)
        return record

    factory.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(factory)


def _mark(match: re.Match[str]) -> str:
    return f"{match[match.lastindex] if match.lastindex else ''}{MARK}"


@dataclass(frozen=True)
class _Known:
    """All that is secret now, as one expression; the literal values, for a quick look."""

    values: tuple[str, ...]
    pattern: re.Pattern[str]

    def clean(self, text: str) -> str:
        if any(value in text for value in self.values) or _has_a_form(text):
            return self.pattern.sub(_mark, text)
        return text


def _has_a_form(text: str) -> bool:
    low = text.lower()
    return any(trace in low for trace in _TRACES) or ("://" in low and "@" in low)


def _known() -> _Known:
    """What is secret now; made anew when the environment or a login changes."""
    files = tuple(_stamp(home() / name) for name in CREDENTIALS)
    return _compiled(frozenset(os.environ.items()), files)


def _stamp(path: Path) -> tuple[Path, int]:
    """When a file of a login was written; 0 where there is none, or one that is not ours to read, and so not ours to tell."""
    try:
        return path, path.stat().st_mtime_ns if os.access(path, os.R_OK) else 0
    except OSError:
        return path, 0


@lru_cache(maxsize=8)
def _compiled(environment: frozenset[tuple[str, str]], files: tuple[tuple[Path, int], ...]) -> _Known:
    known: set[str] = set()
    for name, value in environment:
        known |= _secrets_of(value, whole=_named_secret(name, value))
    for path, _ in (file for file in files if file[1]):
        with suppress(OSError):
            known |= _secrets_of(path.read_text(encoding="utf-8").strip(), whole=True)
    # How a secret looks in JSON, in an address and in a page.
    values = sorted(
        {
            spelt
            for secret in known
            for spelt in {
                secret,
                json.dumps(secret)[1:-1],
                json.dumps(secret, ensure_ascii=False)[1:-1],
                quote(secret, safe=""),
                secret.translate(_HTML),
            }
        },
        key=lambda text: (-len(text), text),
    )
    return _Known(tuple(values), re.compile("|".join([*map(re.escape, values), _FORMS])))


def _named_secret(name: str, value: str) -> bool:
    """Whether a variable's name says that it holds a secret, and its value is none that anybody may see."""
    path = os.sep in value and os.path.exists(value)  # noqa: PTH110 - Path.exists raises when a value is too long
    return bool(_NAME.search(name.upper())) and not _ORDINARY.fullmatch(value) and not path


def _secrets_of(value: str, *, whole: bool) -> set[str]:
    """The secrets in a value: all of it, the password of user:password, the parts that have the form of one."""
    login = _LOGIN.fullmatch(value)
    results = {value, login[1] if login else value} if whole else set()
    results |= {match[0][len(match[match.lastindex]) if match.lastindex else 0 :] for match in _FORM.finditer(value)}
    return {
        text
        for text in results
        if len(text) >= SHORTEST and not _ORDINARY.fullmatch(text) and not _WORD.fullmatch(text)
    }


def _clean(value: Any, known: _Known) -> Any:
    if isinstance(value, str):
        return known.clean(value)
    if isinstance(value, dict):
        return {_clean(key, known): _clean(below, known) for key, below in value.items()}
    if isinstance(value, list):
        return [_clean(below, known) for below in value]
    return tuple(_clean(below, known) for below in value) if type(value) is tuple else value


def _inner(error: BaseException) -> dict[str, BaseException]:
    """Errors that an error carries as attributes."""
    return {name: value for name, value in vars(error).items() if isinstance(value, BaseException)}


def _readable(error: BaseException) -> BaseException:
    """The error, unless its text is made of what cannot be changed, and holds a secret."""
    clean = redact(str(error))
    return error if clean == str(error) else RuntimeError(f"{type(error).__name__}: {clean}")


def _clean_record(record: Any) -> None:
    """Message and traceback of a log record; one whose arguments do not fit its message is left to logging's own error."""
    try:
        output = record.getMessage()
    except (TypeError, ValueError, KeyError):
        record.msg, record.args = redact(str(record.msg)), redact_value(record.args)
        return
    clean = redact(output)
    if clean != output:
        record.msg, record.args = clean, ()
    if record.exc_info and record.exc_info[1] is not None:
        import traceback

        trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        if redact(trace) != trace:
            record.exc_text, record.exc_info = redact(trace), None


def _leaves(name: str, value: Any) -> list[tuple[str, str]]:
    """Every text in a tree of settings, with its dotted name."""
    if isinstance(value, Mapping):
        return [leaf for key, below in value.items() for leaf in _leaves(f"{name}.{key}".lstrip("."), below)]
    if isinstance(value, list | tuple):
        return [leaf for below in value for leaf in _leaves(name, below)]
    return [(name, value)] if isinstance(value, str) else []
