"""Secrets and personal data in documents: found, counted and placed, never copied.

Secrets are what detect-secrets' detectors of named forms say (DETECTORS). Its detectors of high entropy, of keywords, of
public addresses, and those of Artifactory, Cloudant, IBM and SoftLayer are not used: on prose and code they mostly err.
Running all on every line takes minutes a gigabyte, so RE2 (through pyarrow) first looks over a batch with one expression that
every secret matches; the library's own detectors see only the lines that it finds.

Personal data: e-mail addresses, payment cards (Visa, Mastercard, American Express, Discover, JCB; Luhn's check digit) and
IBANs (ISO 13616: country's length, check digits). Telephone numbers are not looked for: without a country they are just
digits. An address that is nobody's is not counted: see NOBODY, and domains that RFC 2606 reserves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import Texts, windows

DETECTORS = {
    "aws.AWSKeyDetector": r"A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}|(?i:aws.{0,20}?(?:key|pw|pass|token))",
    "azure_storage_key.AzureStorageKeyDetector": r"AccountKey=[a-zA-Z0-9+/=]{4}",
    "basic_auth.BasicAuthDetector": r"://[^:/?#@\s]+:[^:/?#@\s]+@",
    "discord.DiscordBotTokenDetector": r"\.[a-zA-Z\d_-]{6}\.[a-zA-Z\d_-]{27}",
    "github_token.GitHubTokenDetector": r"gh[pousr]_[A-Za-z0-9_]{4}",
    "gitlab_token.GitLabTokenDetector": r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[A-Za-z0-9_-]{4}|GR1348941",
    "jwt.JwtTokenDetector": r"eyJ[A-Za-z0-9_=-]{8}",
    "mailchimp.MailchimpDetector": r"-us[0-9]",
    "npm.NpmDetector": r"/:_authToken=",
    "openai.OpenAIDetector": r"T3BlbkFJ",
    "private_key.PrivateKeyDetector": r"PRIVATE KEY|PuTTY-User",
    "pypi_token.PypiTokenDetector": r"pypi-Ag",
    "sendgrid.SendGridDetector": r"SG\.[a-zA-Z0-9_-]{22}",
    "slack.SlackDetector": r"(?i:xox[abposr]-\d|hooks\.slack\.com/services/T)",
    "square_oauth.SquareOAuthDetector": r"sq0csp-",
    "stripe.StripeDetector": r"k_live_[0-9a-zA-Z]{4}",
    "telegram_token.TelegramBotTokenDetector": r"\d:[0-9A-Za-z_-]{35}",
    "twilio.TwilioKeyDetector": r"AC[a-z0-9]{32}|SK[a-z0-9]{32}",
}
"""Detectors of detect_secrets.plugins, and for each what every match of its has in it, as RE2 spells it: little more than
literals, since what RE2 must count up to makes states that leave the cache (`[0-9a-z]{32}-us` alone trebles the time)."""
NOBODY = frozenset(
    {"git", "hg", "svn", "noreply", "no-reply", "donotreply", "do-not-reply", "user", "username", "name"}
)
"""Local parts that name no person."""
_RESERVED = re.compile(r"(?:^|\.)(?:example|invalid|test|localhost|local|noreply\.github)(?:\.(?:com|org|net|edu))?$")
_NO_DOMAIN = frozenset({"png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "py", "html", "so", "dll"})
"""Endings of files: `icon@2x.png` is no address."""
_ADDRESS = re.compile(
    rb"([A-Za-z0-9][A-Za-z0-9._%+-]{0,63})@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}([A-Za-z]{2,24}))"
    rb"(?![A-Za-z0-9_-])"
)
_CARD = (
    r"\b(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d|6011|65\d\d|35[2-8]\d)(?:\d{12}|(?:-\d{4}){3}|(?: \d{4}){3})\b"
    r"|\b3[47]\d\d(?:\d{11}|-\d{6}-\d{5}| \d{6} \d{5})\b"
)
_IBAN = r"\b[A-Z]{2}\d\d(?:[A-Z0-9]{11,30}|(?: [A-Z0-9]{4}){2,7}(?: [A-Z0-9]{1,3})?)\b"
_CARD_LINE, _IBAN_LINE = re.compile(rf"(?<![.\d-])(?:{_CARD})(?![.-]?\d)", re.ASCII), re.compile(_IBAN, re.ASCII)
IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28, "CH": 21,
    "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27,
    "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MD": 24,
    "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29,
    "RO": 24, "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24,
    "XK": 20,
}  # fmt: skip
"""Characters of an IBAN by country: the registry of ISO 13616."""


Kind = Literal["secret", "personal"]
STRIDE = 2048
"""A longer line is looked at in pieces that begin every so many bytes and are twice as long: what is longer is cut off."""


class Finding(NamedTuple):
    """Where something stands: characters `start` to `stop` of a document of the batch."""

    document: int
    kind: Kind
    type: str
    start: int
    stop: int


def find(texts: Texts) -> list[Finding]:
    """All secrets and personal data of a batch, in the order of documents."""
    results = sorted([*_in_lines(texts), *_addresses(texts)], key=lambda each: (each.document, each.start, each.type))
    return list(_in_characters(texts, results))


@lru_cache(maxsize=1)
def detectors() -> tuple[tuple[re.Pattern[str], Any], ...]:
    """The library's detectors behind their stems."""
    made = []
    for name, stem in DETECTORS.items():
        module, detector = name.split(".")
        made.append((re.compile(stem), getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()))
    return tuple(made)


def load() -> None:
    """Import what finding needs: half a second, once in a process."""
    import pyarrow.compute  # noqa: F401

    detectors()


def passes_luhn(number: str) -> bool:
    """Whether the digits end with the check digit of ISO/IEC 7812-1, annex B."""
    digits = [int(digit) for digit in number if digit.isdigit()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return (doubled + sum(digits[-1::-2])) % 10 == 0


def is_iban(text: str) -> bool:
    """Whether a text has the length of its country and the check digits of ISO 13616 (modulo 97)."""
    plain = text.replace(" ", "")
    if IBAN_LENGTHS.get(plain[:2]) != len(plain):
        return False
    return int("".join(str(int(letter, 36)) for letter in plain[4:] + plain[:4])) % 97 == 1


def _in_characters(texts: Texts, results: list[Finding]) -> Iterator[Finding]:
    """The same, with places in characters instead of bytes; a document is decoded once, however much stands in it."""
    document, at, characters = -1, 0, 0
    for each in results:
        data = texts.encoded[each.document]
        if each.document != document:
            document, at, characters = each.document, 0, 0
        characters += len(data[at : each.start].decode())
        at = each.start
        yield each._replace(start=characters, stop=characters + len(data[at : each.stop].decode()))


def _in_lines(texts: Texts) -> Iterator[Finding]:
    """Secrets, cards and IBANs, by bytes: RE2 names the documents, then their lines; the exact look follows."""
    import pyarrow as pa

    documents = _matching(_parts(texts.buffer, texts.starts))
    if not documents:
        return
    named = Texts([texts.texts[index] for index in documents], [texts.encoded[index] for index in documents])
    pieces = [(documents[place], *piece) for place, start, line in _lines(named) for piece in _pieces(start, line)]
    for number in _matching(pa.array([piece[-1] for piece in pieces], pa.large_binary())):
        document, begin, low, high, data = pieces[number]
        for kind, name, (first, last) in _in_line(data.translate(_ASCII).decode("latin-1")):
            if low <= first < high:
                yield Finding(document, kind, name, begin + first, begin + last)


def _lines(texts: Texts) -> Iterator[tuple[int, int, bytes]]:
    """The lines in which RE2 finds anything: document, first byte within it, line."""
    buffer = texts.buffer
    feeds = np.flatnonzero(np.frombuffer(buffer, np.uint8) == 10)
    bounds = np.concatenate(([0], feeds + 1, [len(buffer) + 1]))
    for number in _matching(_parts(buffer, bounds)):
        begin, end = int(bounds[number]), int(bounds[number + 1])
        place = int(texts.documents_at(bounds[number : number + 1])[0])
        yield place, begin - int(texts.starts[place]), buffer[begin : end - 1]


def _pieces(start: int, line: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """A line, in pieces when it is long: where each begins, between which of its bytes it counts, and the piece."""
    if len(line) <= 2 * STRIDE:
        yield start, 0, len(line), line
        return
    for place in range(0, len(line), STRIDE):
        before = min(place, 64)
        yield start + place - before, before, before + STRIDE, line[place - before : place + 2 * STRIDE]


def _in_line(line: str) -> Iterator[tuple[Kind, str, tuple[int, int]]]:
    for stem, detector in detectors():
        if stem.search(line):
            yield from (("secret", detector.secret_type, span) for span in _secrets(line, detector))
    for match in _CARD_LINE.finditer(line):
        if passes_luhn(match[0]):
            yield "personal", "payment card", match.span()
    for match in _IBAN_LINE.finditer(line):
        if is_iban(match[0]):
            yield "personal", "IBAN", match.span()


def _secrets(line: str, detector: Any) -> list[tuple[int, int]]:
    """Where the matches of a detector stand; the detector itself has the last word, since some check what they match."""
    spans = {match.span() for regex in detector.denylist for match in regex.finditer(line)}
    return sorted(span for span in spans if next(iter(detector.analyze_string(line[slice(*span)])), None) is not None)


def _addresses(texts: Texts) -> Iterator[Finding]:
    """E-mail addresses, by bytes, looked at where an at sign stands between letters."""
    data = np.frombuffer(texts.buffer, np.uint8)
    for start, part in windows(texts.buffer):
        places = np.flatnonzero(part == 64) + start
        places = places[(places > 0) & (places < len(data) - 1)]
        places = places[_LOCAL[data[places - 1]] & _DOMAIN[data[places + 1]]]
        for place, document in zip(places.tolist(), texts.documents_at(places).tolist(), strict=True):
            if span := _address(texts.buffer, place):
                first = int(texts.starts[document])
                yield Finding(document, "personal", "e-mail address", span[0] - first, span[1] - first)


def _address(buffer: bytes, place: int) -> tuple[int, int] | None:
    """Where the address around an at sign begins and ends; None when it is none, or nobody's."""
    begin = max(place - 64, 0)
    local = _LOCAL_END.search(buffer[begin:place])
    match = _ADDRESS.match(buffer, begin + local.start(), place + 256) if local else None
    if not match or match.end(1) != place:
        return None
    name, domain, last = (match[index].decode().lower() for index in (1, 2, 3))
    if name in NOBODY or last in _NO_DOMAIN or _RESERVED.search(domain):
        return None
    before = buffer[max(match.start() - 128, 0) : match.start()]
    if b"://" in before and _INSIDE_URL.search(before):
        return None
    return match.span()


def _parts(buffer: bytes, bounds: NDArray[np.int64]) -> Any:
    """Parts of a buffer as pyarrow sees them, without a copy; `bounds` says where each begins, and where one more would."""
    import pyarrow as pa

    offsets = pa.py_buffer(np.minimum(bounds, len(buffer)))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, [None, offsets, pa.py_buffer(buffer)])


def _matching(strings: Any) -> list[int]:
    """The indices of the strings in which RE2 finds anything."""
    import pyarrow.compute as pc

    result = pc.match_substring_regex(strings, pattern=_GATE)
    return np.flatnonzero(result.to_numpy(zero_copy_only=False)).tolist()


def _table(characters: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(characters)] = True
    return table


_ALPHANUMERIC = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LOCAL, _DOMAIN = _table(_ALPHANUMERIC + b"._%+-"), _table(_ALPHANUMERIC)
_LOCAL_END = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._%+-]*\Z")
_INSIDE_URL = re.compile(rb"://[^\s/@]*:\Z")
_GATE = "|".join([*DETECTORS.values(), _CARD, _IBAN])
_ASCII = bytes(byte if byte < 128 else 0xAA for byte in range(256))
"""What is not ASCII as a letter, byte for byte, so that a place in the text is a place among the bytes."""
