"""What kind of document a text is: the script that most of its letters and digits are of."""

from __future__ import annotations

import numpy as np

from tasks.data.corpus.measures import CLASSES, classes

SCRIPTS = {
    "letters": "latin",
    "latin": "latin",
    "digits": "digits",
    **{
        name: name
        for name in ("greek", "cyrillic", "arabic_hebrew", "indic_thai", "cjk", "hangul", "emoji_other", "other")
    },
}
"""The kind by the class of a character; ASCII letters and letters with accents are one, and signs and blanks tell nothing."""


def kind_of(text: str) -> str:
    """`latin`, `cyrillic`, `cjk`, `digits` and so on; `none` for a text without a letter or a digit."""
    counts = classes(np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256))
    totals: dict[str, int] = {}
    for name, count in zip(CLASSES, counts.tolist(), strict=True):
        if name in SCRIPTS:
            totals[SCRIPTS[name]] = totals.get(SCRIPTS[name], 0) + count
    kind = max(totals, key=lambda name: totals[name])
    return kind if totals[kind] else "none"
