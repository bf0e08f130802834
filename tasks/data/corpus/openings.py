"""How documents of a corpus begin: prompts of the kind of text that a model was, or will be, trained on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.corpus.reading import read_unit

OPENINGS = 3
OPENING_CHARACTERS = 40
"""The longest opening: a prompt for people to read, and short beside the context of the smallest model."""
LOOKED_AT = 200
"""Documents of a corpus that are looked at for openings."""


def openings(texts: Iterable[str], count: int = OPENINGS) -> list[str]:
    """How the first few documents begin, of those that begin alike one.

    An opening is within the first line and the first half of its document, and ends with a whole word where there are words.
    """
    return list(islice((opening for opening in dict.fromkeys(map(_opening, texts)) if opening), count))


def openings_of(source: Path, text_field: str, count: int) -> list[str]:
    """Openings of a file or folder; none where nothing can be read of it."""
    try:
        units = cut(find_shards([source]))
        texts = (text for unit in units for batch in read_unit(unit, (text_field,)) for text in batch.texts)
        return openings(islice(texts, LOOKED_AT), count)
    except ValueError:  # whoever publishes it is told what is wrong
        return []


def _opening(text: str) -> str:
    line = text.strip().partition("\n")[0].rstrip()
    longest = min(OPENING_CHARACTERS, len(text.strip()) // 2)
    return line if len(line) <= longest else line[: longest + 1].rpartition(" ")[0].rstrip() or line[:longest]
