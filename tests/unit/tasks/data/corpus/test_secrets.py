"""Secrets and personal data: one of each form is found at its place, and what only looks like one is not."""

import base64
import json
import random
import string

import pytest
from support import STDLIB

from tasks.data.corpus.measures import Texts
from tasks.data.corpus.secrets import DETECTORS, STRIDE, Finding, detectors, find, is_iban, passes_luhn

pytestmark = pytest.mark.unit

LETTERS = (string.ascii_letters + string.digits) * 4


def token(part):
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


SECRETS = {
    "AWS Access Key": ["AKIAIOSFODNN7EXAMPLE", f"aws_secret_key = '{LETTERS[:40]}'"],
    "Azure Storage Account access key": [f"AccountKey={LETTERS[:86]}=="],
    "Basic Auth Credentials": ["://anna:geheim@"],
    "Discord Bot Token": [f"M{LETTERS[:23]}.{LETTERS[:6]}.{LETTERS[:27]}"],
    "GitHub Token": [f"ghp_{LETTERS[:36]}", f"ghs_{LETTERS[:36]}"],
    "GitLab Token": [f"glpat-{LETTERS[:20]}", f"GR1348941{LETTERS[:20]}"],
    "JSON Web Token": [f"{token({'alg': 'HS256'})}.{token({'sub': '1234567890'})}.{'c2ln' * 8}"],
    "Mailchimp Access Key": [f"{'0123456789abcdef' * 2}-us12"],
    "NPM tokens": [f"//packages.example/:_authToken=npm_{LETTERS[:36]}"],
    "OpenAI Token": [f"sk-{LETTERS[:20]}T3BlbkFJ{LETTERS[:20]}"],
    "Private Key": ["BEGIN RSA PRIVATE KEY", "BEGIN OPENSSH PRIVATE KEY", "PuTTY-User-Key-File-2"],
    "PyPI Token": [f"pypi-AgEIcHlwaS5vcmc{LETTERS[:70]}"],
    "SendGrid API Key": [f"SG.{LETTERS[:22]}.{LETTERS[:43]}"],
    "Slack Token": ["xoxb-123456789-abcdef", "https://hooks.slack.com/services/T000/B000/XXXX"],
    "Square OAuth Secret": [f"sq0csp-{LETTERS[:43]}"],
    "Stripe Access Key": [f"sk_live_{LETTERS[:24]}", f"rk_live_{LETTERS[:24]}"],
    "Telegram Bot Token": [f"110201543:{LETTERS[:35]}"],
    "Twilio API Key": [f"AC{'0123456789abcdef' * 2}", f"SK{'0123456789abcdef' * 2}"],
}
PERSONAL = {
    "e-mail address": ["anna.meier+x@firma-nord.co.uk", "a@b.de"],
    "payment card": ["4111 1111 1111 1111", "5555-5555-5555-4444", "378282246310005", "6011111111111117", "3530111333300000"],
    "IBAN": ["DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19", "NO93 8601 1117 947"],
}  # fmt: skip
ENDS = {"JSON Web Token": lambda text: text.rindex(".") + 1, "NPM tokens": lambda text: len(text) + 1}
"""The library leaves out a token's signature, and takes an npm line to its end."""
EVERY = [
    (kind, name, text)
    for kind, all_ in (("secret", SECRETS), ("personal", PERSONAL))
    for name in all_
    for text in all_[name]
]


def test_every_detector_has_a_plant():
    assert {detector.secret_type for _, detector in detectors()} == SECRETS.keys()
    assert len(DETECTORS) == len(SECRETS)


@pytest.mark.parametrize(("kind", "name", "planted"), EVERY)
def test_each_form_is_found_at_its_place_in_its_document(kind, name, planted):
    before, after = "Grüße 😀\nzwei = 2\n\t'", "'\nnächste Zeile"
    found = find(Texts.of(["nothing\nhere", before + planted + after, "", "nor here"]))
    stop = len(before) + ENDS.get(name, len)(planted)
    assert Finding(1, kind, name, len(before), stop) in found
    assert {each.type for each in found} == {name}
    assert [each.document for each in found] == [1]


def test_two_on_one_line_are_two():
    text = f"a = 'ghp_{'a' * 36}' b = 'ghp_{'b' * 36}' x@firma.de,y@firma.de"
    assert [each.type for each in find(Texts.of([text]))] == ["GitHub Token"] * 2 + ["e-mail address"] * 2


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:owner/repo.git",
        "noreply@github.com, user@example.com, you@mail.example.org, root@localhost, a@b.test",
        "123+name@users.noreply.github.com",
        "icon@2x.png @property.setter matrix@vector.T x @ y",
        "4111 1111 1111 1112",  # Luhn
        "0.4111111111111111 14111111111111111 4111111111111111-0 -4111111111111111",
        "1234 5678 9012 3452",  # no issuer
        "DE88370400440532013000 DE8937040044053201300 XX89370400440532013000",
        "https://host:8080/path@x and http://user@host/ and time 12:30",
        "eyJhbGciOiJIUzI1NiJ9x.notatoken",
        "AKIA is how they begin, -----BEGIN CERTIFICATE-----, ghp_short, sk_live_short, /:_authToken=",
        "a" * 5000,
    ],
)
def test_what_only_looks_like_one_is_not_counted(text):
    assert find(Texts.of([text])) == []


def test_lines_are_looked_at_alone_and_long_ones_whole():
    long = "x " * 40_000 + "AKIAIOSFODNN7EXAMPLE" + " y" * 40_000
    assert find(Texts.of(["AKIAIOSFO\nDNN7EXAMPLE", long])) == [Finding(1, "secret", "AWS Access Key", 80_000, 80_020)]


@pytest.mark.parametrize("before", [0, 1000, STRIDE - 5, 2 * STRIDE - 5, 3 * STRIDE, 100_001])
def test_of_a_long_line_each_is_found_once(before):
    plants = ["AKIAIOSFODNN7EXAMPLE", f"ghp_{'a' * 36}", "4111 1111 1111 1111"]
    text = "ü " * before + " ".join(plants) + " z" * 5000
    assert [text[each.start : each.stop] for each in find(Texts.of([text]))] == plants


def test_many_findings_stand_in_the_order_of_documents_and_characters():
    texts = [f"{'x' * n} n{n}@firma.de 4111111111111111" for n in range(50)]
    found = find(Texts.of(texts))
    assert [each.document for each in found] == [n for n in range(50) for _ in range(2)]
    assert [texts[each.document][each.start : each.stop] for each in found[::2]] == [
        f"n{n}@firma.de" for n in range(50)
    ]


def test_check_digits():
    assert passes_luhn("4111 1111 1111 1111") and not passes_luhn("4111 1111 1111 1121")
    assert is_iban("GB29 NWBK 6016 1331 9268 19") and not is_iban("GB92 NWBK 6016 1331 9268 19")


def test_the_short_cut_finds_what_the_library_finds_on_every_line():
    rng = random.Random(5)
    planted = [text for texts in SECRETS.values() for text in texts]
    texts = [
        path.read_text(errors="ignore")
        for folder in ("email", "http", "asyncio")
        for path in (STDLIB / folder).glob("*.py")
    ]
    for number, plant in enumerate(planted * 3):
        lines = texts[number % len(texts)].split("\n")
        lines.insert(rng.randrange(len(lines)), f"key{rng.choice('= :')}{rng.choice(['', ' ', chr(39)])}{plant}'")
        texts[number % len(texts)] = "\n".join(lines)
    expected = [
        (document, detector.secret_type)
        for document, text in enumerate(texts)
        for line in text.split("\n")
        for _, detector in detectors()
        for regex in detector.denylist
        for match in regex.finditer(line)
        if list(detector.analyze_string(match[0]))
    ]
    assert len(expected) >= 3 * len(planted)
    found = [(each.document, each.type) for each in find(Texts.of(texts)) if each.kind == "secret"]
    assert sorted(found) == sorted(expected)
