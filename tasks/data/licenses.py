"""What a licence says about training on a dataset, or from a base model, as far as its id alone tells. Pure.

Ids are those of the Hugging Face hub (https://huggingface.co/docs/hub/repositories-licenses): SPDX's, where SPDX has one.
Looked at are two things: whether it forbids commercial use, and whether it forbids derived works. Whatever is not in the tables
is not judged: terms of their own, copyleft and share-alike are for a person to read. None of it is legal advice. See
docs/hugging-face.md.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from tasks.artifacts import Check
from tasks.config.data import LicenseWaiver

Verdict = Literal["allows", "forbids", "not judged", "waived"]
ALLOWS = re.compile(
    r"apache-2\.0|mit|mit-0|bsd|bsd-2-clause|bsd-3-clause(-clear)?|0bsd|isc|zlib|bsl-1\.0|unlicense|wtfpl|cc0-1\.0|pddl|"
    r"cc-by-(2\.0|2\.5|3\.0|4\.0)|odc-by|cdla-permissive-[12]\.0|ms-pl|postgresql|ncsa|afl-3\.0|ecl-2\.0"
)
"""Licences that allow both, under conditions such as naming the authors."""
FORBIDS = {
    "commercial use": re.compile(
        r"cc-by-nc(-sa|-nd)?-[\d.]+|fair-noncommercial-research-license|intel-research|apple-amlr"
    ),
    "derived works": re.compile(r"cc-by(-nc)?-nd-[\d.]+"),
}
"""Licences that do not allow one of them."""


class Terms(NamedTuple):
    """What is known of the licence of an artifact."""

    license: str
    """Ids, with commas between several; empty: nobody says."""
    origin: str = ""
    """Where it came from, on a hub."""


class Judged(NamedTuple):
    """An artifact's licence, and what that says."""

    ref: str
    terms: Terms
    verdict: Verdict
    why: str


def judge(terms: Mapping[str, Terms], waivers: Sequence[LicenseWaiver], today: datetime.date) -> list[Judged]:
    """Judge the licence of each artifact, by its reference; a waiver counts until its last day."""
    return [_judged(ref, one, waivers, today) for ref, one in sorted(terms.items())]


def checks(judged: Sequence[Judged]) -> tuple[Check, ...]:
    """A failed check for each licence that forbids what is to be done."""
    return tuple(
        Check(
            name=f"licence of {one.ref.partition('@')[0]}",
            measured=one.terms.license,
            limit=f"allows it, or is waived ({one.why})",
            passed=False,
            remedy="Use other data or another base; or, if you have a permission, write it down in licenses.waivers: of, who, "
            "why, until.",
        )
        for one in judged
        if one.verdict == "forbids"
    )


def _judged(ref: str, terms: Terms, waivers: Sequence[LicenseWaiver], today: datetime.date) -> Judged:
    ids = [one.strip().lower() for one in terms.license.split(",") if one.strip()]
    forbidden = [what for what, pattern in FORBIDS.items() if any(pattern.fullmatch(one) for one in ids)]
    if forbidden:
        for waiver in waivers:
            if waiver.of == ref.partition("@")[0] and waiver.until >= today:
                return Judged(ref, terms, "waived", f"by {waiver.who} until {waiver.until}: {waiver.why}")
        ended = [one for one in waivers if one.of == ref.partition("@")[0]]
        late = f"; the waiver of {ended[-1].who} ended on {ended[-1].until}" if ended else ""
        return Judged(ref, terms, "forbids", f"it forbids {' and '.join(forbidden)}{late}")
    if ids and all(ALLOWS.fullmatch(one) for one in ids):
        return Judged(ref, terms, "allows", "")
    return Judged(ref, terms, "not judged", "someone has to read its terms" if ids else "nobody says its licence")
