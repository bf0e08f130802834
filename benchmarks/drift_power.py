"""What drift's verdict is worth: alarms of windows of unchanged text, and planted shifts that are found. Seeded.

Documents are the functions and classes of the Python standard library, each one once, shuffled. A comparison takes two windows
of WINDOW documents from them, none twice, so that nothing has changed but chance. `python -m benchmarks.drift --power N` runs
it, tests/integration/tasks/data/drift/test_power.py a sample of it.
"""

import ast
import gettext
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tasks.config.revalidation import DriftConfig
from tasks.data.corpus.measures import Texts, content_hashes
from tasks.data.drift.comparison import Side, compare
from tasks.data.drift.features import Measured, Vocabulary, measure, open_vocabulary, together
from tasks.data.drift.sampling import HEAD, Drawn, earlier_copies

WINDOW = 1000
POOL = 12_000
SHARE = 0.1
"""Of the new documents that a shift changes, where it does not change all."""
BOILERPLATE = (
    "# This file is part of a product. All rights are reserved; see the file LICENSE for what you may do with it.\n"
    "# Provided as is, without a warranty of any kind, express or implied, including that it is fit for a purpose.\n\n"
)


@dataclass(frozen=True)
class Pool:
    """Documents to draw windows from, measured once."""

    texts: list[str]
    measured: Measured
    vocabulary: Vocabulary | None

    def side(self, chosen: np.ndarray, change: dict[int, str] | None = None) -> Side:
        """A window, some of its documents by other texts: by the number within the window."""
        change = change or {}
        texts = [change.get(place, self.texts[row]) for place, row in enumerate(chosen.tolist())]
        measured = self.measured.rows(chosen)
        if change:
            places = sorted(change)
            other = _measured([change[place] for place in places], self.vocabulary)
            order = np.arange(len(texts))
            order[places] = len(texts) + np.arange(len(places))
            measured = together([measured, other]).rows(order)
        hashes = content_hashes(Texts.of(texts))[:, 1]
        heads = [text[:HEAD] for text in texts]
        size, lengths = sum(len(text.encode()) for text in texts), measured.lengths
        none = np.zeros(0, np.int64)
        return Side(
            "window", Drawn(len(texts), size, 0, none, heads, lengths, hashes, earlier_copies(hashes)), measured
        )


def functions(seed: int, most: int = POOL) -> list[str]:
    """Functions and classes of the standard library, of 200 characters or more, each once."""
    found: set[str] = set()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            found.update(_parts(path))
    ordered = sorted(found)
    random.Random(seed).shuffle(ordered)
    return ordered[:most]


def pool(seed: int, *, most: int = POOL, tokenizer: Path | None = None) -> Pool:
    """Documents, measured; with a tokenizer, by all ten columns."""
    texts = functions(seed, most)
    vocabulary = open_vocabulary(tokenizer, texts[:100]) if tokenizer else None
    return Pool(texts, _measured(texts, vocabulary), vocabulary)


def unchanged(of: Pool, seed: int, *, sizes: tuple[int, int] = (WINDOW, WINDOW), splits: int = 400) -> dict:
    """The evidence of one window of unchanged text against another."""
    return _compared(of, seed, sizes, lambda new, dice: {}, splits)


def planted(of: Pool, shift: str, seed: int, *, splits: int = 400) -> dict:
    """The evidence of a window with a planted shift against one without."""
    return _compared(of, seed, (WINDOW, WINDOW), SHIFTS[shift], splits)


def _compared(of: Pool, seed: int, sizes: tuple[int, int], change: Callable, splits: int) -> dict:
    drawn = np.random.default_rng(seed).permutation(len(of.texts))
    chosen, rows = drawn[: sizes[0]], drawn[sizes[0] : sum(sizes)]
    changed = change([of.texts[row] for row in rows], random.Random(seed))
    config = DriftConfig(splits=splits, seed=seed)
    return compare(of.side(chosen), of.side(rows, changed), config, vocabulary=of.vocabulary, seconds={})


def vocabulary(texts: list[str], dice: random.Random) -> dict[int, str]:
    """One word of ten is another one, wherever it stands."""
    words = sorted({word for text in texts for word in re.findall(r"[A-Za-z]{3,}", text)})
    other = {word: _made_word(dice) for word in dice.sample(words, len(words) // 10)}
    return {i: re.sub(r"[A-Za-z]{3,}", lambda m: other.get(m[0], m[0]), text) for i, text in enumerate(texts)}


def language(texts: list[str], dice: random.Random) -> dict[int, str]:
    """One document of ten is French: sentences of translated messages."""
    return {place: _french(dice) for place in _some(texts, dice)}


def whole_language(texts: list[str], dice: random.Random) -> dict[int, str]:
    """All documents are French."""
    return {place: _french(dice) for place in range(len(texts))}


def boilerplate(texts: list[str], dice: random.Random) -> dict[int, str]:
    """One document of ten begins with the same two lines."""
    return {place: BOILERPLATE + texts[place] for place in _some(texts, dice)}


def encoding(texts: list[str], dice: random.Random) -> dict[int, str]:
    """One document of ten is broken: one byte of a hundred unreadable, or typographic quotes read as Windows-1252."""
    return {place: _broken(texts[place], dice) for place in _some(texts, dice)}


def style(texts: list[str], dice: random.Random) -> dict[int, str]:
    """One document of ten is indented by tabs and writes names in camel case."""
    return {place: _restyled(texts[place]) for place in _some(texts, dice)}


SHIFTS: dict[str, Callable] = {
    "10 % of the vocabulary replaced": vocabulary,
    "10 % of documents in French": language,
    "all documents in French": whole_language,
    "boilerplate in 10 % of documents": boilerplate,
    "broken encoding in 10 % of documents": encoding,
    "other code style in 10 % of documents": style,
}


def _measured(texts: list[str], vocabulary: Vocabulary | None) -> Measured:
    return measure([text[:HEAD] for text in texts], np.array([len(text) for text in texts], np.int64), vocabulary)


def _parts(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in members:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = "\n".join(lines[each.lineno - 1 : each.end_lineno])
                if len(text) >= 200 and "\ud800" not in text:
                    yield text.encode(errors="replace").decode()


def _some(texts: list[str], dice: random.Random) -> list[int]:
    return dice.sample(range(len(texts)), int(len(texts) * SHARE))


def _made_word(dice: random.Random) -> str:
    return "".join(dice.choice("bdfgklmnprstvz") + dice.choice("aeiou") for _ in range(dice.randint(2, 4)))


def _french(dice: random.Random) -> str:
    """20 sentences of the French messages of WTForms."""
    spec = find_spec("wtforms")
    assert spec and spec.origin
    with open(Path(spec.origin).parent / "locale" / "fr" / "LC_MESSAGES" / "wtforms.mo", "rb") as file:
        catalogue = gettext.GNUTranslations(file)._catalog
    messages = [text for key, text in catalogue.items() if key and isinstance(text, str)]
    return "\n".join(dice.choice(messages) for _ in range(20))


def _broken(text: str, dice: random.Random) -> str:
    if dice.random() < 0.5:
        return "".join("\ufffd" if dice.random() < 0.01 else letter for letter in text)
    quoted = text.replace('"', "\u201c").replace("'", "\u2019")
    return quoted.encode().decode("cp1252", "replace")


def _restyled(text: str) -> str:
    tabbed = re.sub(r"(?m)^( {4})+", lambda m: "\t" * (len(m[0]) // 4), text)
    return re.sub(r"(?<=[a-z])_([a-z])", lambda m: m[1].upper(), tabbed)
