"""Reads samples of two corpora, compares all their columns, judges them as a family, and writes drift.json.

Its form is docs/drift.md's, "Evidence". No text of a document is in it but single words and tokens.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.revalidation import DriftConfig
from tasks.data.corpus import secrets
from tasks.data.corpus.inputs import Shard
from tasks.data.corpus.measures import Texts
from tasks.data.corpus.pool import on_processes
from tasks.data.corpus.tokens import read_words
from tasks.data.drift.columns import Column, Histogram, Kept, frequencies, measured_columns, moved
from tasks.data.drift.features import WORD_BITS, Measured, Vocabulary, measure, open_vocabulary, together
from tasks.data.drift.sampling import EVERY, Drawn, draw, read_units
from tasks.data.drift.splits import SMOOTHING, Splits, Values, area_under_curve, judge, split

# The domain classifier: can a document's words say whether it is new? Trained anew for every split, all at once.
#
# Naive Bayes on the presence of words (McCallum and Nigam, AAAI workshop on text categorization, 1998), scored on
# documents that it was not trained on (FOLDS-fold), a document's score being the mean of its words' log odds. Area
# under the curve 0.5: it cannot tell.


PARTS = "parts"
"""Folder of what was read of each unit."""
FOLDS = 4
BLOCK = 64
"""Words that are looked at together."""


def areas(presence: Any, splits: Splits, *, seed: int) -> Values:
    """The cross-validated area under the curve of each split, shape [splits + 1].

    `presence`: documents by words, scipy.sparse, 1 where a document has the word. Folds are drawn without looking at the sides.
    """
    order = np.random.default_rng(seed).permutation(presence.shape[0])
    folds = [np.sort(order[fold::FOLDS]) for fold in range(FOLDS)]
    parts = [presence[fold] for fold in folds]
    counts = [part.T @ np.ascontiguousarray(splits.new[:, fold].T) for part, fold in zip(parts, folds, strict=True)]
    new, every = sum(counts), np.asarray(presence.sum(axis=0), np.float32).reshape(-1, 1)
    scores = np.empty(splits.new.shape, np.float32)
    for part, fold, of_new in zip(parts, folds, counts, strict=True):
        left = every - np.asarray(part.sum(axis=0), np.float32).reshape(-1, 1)
        documents = np.delete(splits.new, fold, axis=1).sum(axis=1)
        weights = np.empty_like(new)
        for start in range(0, len(weights), BLOCK):
            block = slice(start, start + BLOCK)
            trained = new[block] - of_new[block]
            weights[block] = odds(trained, left[block] - trained, documents, presence.shape[0] - len(fold) - documents)
        present = np.maximum(np.asarray(part.sum(axis=1), np.float32), 1)
        scores[:, fold] = ((part @ weights) / present).T
    return area_under_curve(scores, splits)


def odds(new: Any, old: Any, of_new: Any, of_old: Any) -> NDArray[np.float32]:
    """Log odds of words by the documents that have them, on both sides."""
    sizes = np.log((of_old + 2 * SMOOTHING) / (of_new + 2 * SMOOTHING))
    return np.asarray(np.log((new + np.float32(SMOOTHING)) / (old + np.float32(SMOOTHING))) + sizes, np.float32)


# What moved, in words that may be told: which words and tokens say most, without those that may be a secret or a
# person's.
#
# Words are counted by hash only (tasks/data/drift/features.py). The few that say most are looked up in documents that
# have them, after secrets and personal data in those were blanked out.


FEATURES = 20
LOOKED_UP = 60
ERRORS = 2
"""Standard errors that the shares of a word must lie apart to be told."""
FEWEST = 5
"""Documents that a word must be in to be told: what only one or two have may be about somebody."""
LONGEST = 24
RANDOM_BITS = 3.2
"""Bits a character from which a long word with digits looks drawn at random."""
_WORD = re.compile(r"[0-9a-z_\x80-\U0010ffff]+")


@dataclass(frozen=True)
class Feature:
    """A word and the shares of documents that have it, on both sides."""

    feature: str
    weight: float
    """Log odds, base e, that a document with the word is new; below 0 for words of the reference."""
    reference: float
    new: float


def tell(kept: Kept, new: NDArray[np.bool_], heads: Sequence[str]) -> list[Feature]:
    """The words that tell the sides apart best, half of them new ones; `heads` are the documents of the rows."""
    presence = kept.presence
    on_new, on_old = (np.asarray(presence[side].sum(axis=0), np.float64).ravel() for side in (new, ~new))
    of_new, of_old = int(new.sum()), int((~new).sum())
    weights = odds(on_new, on_old, of_new, of_old)
    shares = (on_new + on_old) / (of_new + of_old)
    error = np.sqrt(np.maximum(shares * (1 - shares), 1e-9) * (1 / of_new + 1 / of_old))
    apart = np.where(np.maximum(on_new, on_old) >= FEWEST, (on_new / of_new - on_old / of_old) / error, 0.0)
    order = [np.argsort(-sign * apart, kind="stable")[:LOOKED_UP] for sign in (1, -1)]
    names = _names([c for each in order for c in each.tolist() if abs(apart[c]) > ERRORS], kept, presence, heads)
    entries = [
        [
            Feature(names[c], float(weights[c]), on_old[c] / of_old, on_new[c] / of_new)
            for c in each.tolist()
            if c in names
        ]
        for each in order
    ]
    return [feature for each in entries for feature in each[: FEATURES // 2]]


def told_tokens(kept: Kept, new: NDArray[np.bool_], written: Callable[[int], str]) -> list[Feature]:
    """The tokens that weigh most in the divergence, with their shares of all tokens; those that may not be told are left out."""
    on_new, on_old = (np.asarray(kept.counts[side].sum(axis=0), np.float64).ravel()[:-1] for side in (new, ~new))
    of_new, of_old = max(on_new.sum(), 1.0), max(on_old.sum(), 1.0)
    weights = odds(on_new, on_old, of_new, of_old)
    order = np.argsort(-np.abs(on_new / of_new - on_old / of_old) * np.abs(weights), kind="stable")[:LOOKED_UP]
    names = {column: written(int(kept.labels[column])).strip() for column in order.tolist()}
    allowed = set(may_be_told(list(names.values())))
    entries = [
        Feature(name, float(weights[c]), on_old[c] / of_old, on_new[c] / of_new)
        for c, name in names.items()
        if name in allowed
    ]
    return entries[:FEATURES]


def may_be_told(words: Sequence[str]) -> list[str]:
    """Those words that are short, have a letter, and do not look like a key, a number of somebody or an address."""
    plain = [word for word in words if _is_plain(word)]
    secret = {item.document for item in secrets.find(Texts.of(plain))} if plain else set()
    return [word for place, word in enumerate(plain) if place not in secret]


def _is_plain(word: str) -> bool:
    if not 1 < len(word) <= LONGEST or not any(c.isalpha() for c in word) or "@" in word:
        return False
    digits = sum(c.isdigit() for c in word)
    return digits <= 4 and not (digits and len(word) >= 12 and _bits(word) > RANDOM_BITS)


def _names(order: list[int], kept: Kept, presence: Any, heads: Sequence[str]) -> dict[int, str]:
    """Columns by the word that stands for each: the most frequent of its bucket in a few documents."""
    columns = presence.tocsc()
    rows = {c: columns.indices[columns.indptr[c] : columns.indptr[c + 1]][:FEWEST].tolist() for c in order}
    looked_at = sorted({row for some in rows.values() for row in some})
    # Texts without their secrets and personal data
    texts = [heads[row] for row in looked_at]
    cleaned = list(texts)
    for item in reversed(secrets.find(Texts.of(texts)) if texts else []):
        text = cleaned[item.document]
        cleaned[item.document] = f"{text[: item.start]} {text[item.stop :]}"
    words = dict(zip(looked_at, map(_words, cleaned), strict=True))
    names: dict[int, str] = {}
    for column, some in rows.items():
        met = Counter(words[row].get(int(kept.labels[column]), "") for row in some)
        met.pop("", None)
        if met:
            names[column] = met.most_common(1)[0][0]
    allowed = set(may_be_told(list(names.values())))
    return {column: name for column, name in names.items() if name in allowed}


def _words(text: str) -> dict[int, str]:
    """The words of a document by bucket."""
    candidates = sorted(set(_WORD.findall(text.lower())))
    if not candidates:
        return {}
    texts = Texts.of(candidates)
    read = read_words(texts.buffer, texts.starts)
    single = np.flatnonzero(np.diff(read.bounds) == 1)
    buckets = read.hashes[read.bounds[single]] >> np.uint64(64 - WORD_BITS)
    return dict(zip(buckets.astype(np.int64).tolist(), (candidates[i] for i in single.tolist()), strict=True))


def _bits(word: str) -> float:
    """Shannon's entropy of a word's characters, in bits a character."""
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())


SCHEMA = "headway/drift/1"
DRIFT, NONE, INSUFFICIENT = "drift", "none", "insufficient"
NULL_SHOWN = 200
TOKENS = "token frequencies (Jensen-Shannon divergence)"
WORDS = "word frequencies, by hash, without a tokenizer (Jensen-Shannon divergence)"
DOMAIN = "domain classifier (area under the curve)"
COLUMNS = {
    "tokens": TOKENS, "unknown_tokens": "unknown tokens", "byte_fallback_tokens": "tokens of a single byte beyond ASCII",
    "tokens_per_word": "tokens a word", "length": "length in characters", "language": "language",
    "characters": "classes of characters", "duplicates": "duplicates: documents and lines", "format": "format and style of code",
    "domain": DOMAIN,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One corpus: what was counted of all of it, and what was measured of the documents that are looked at."""

    ref: str
    drawn: Drawn
    measured: Measured


def compare(
    reference: Side, new: Side, config: DriftConfig, *, vocabulary: Vocabulary | None, seconds: dict[str, float]
) -> dict[str, Any]:
    """The new side against the reference, as drift.json says it."""
    # What is missing for a verdict; empty when nothing is.
    sides = {"reference": reference.drawn, "new": new.drawn}
    short = [
        f"the {name} data has {_count(side)}" for name, side in sides.items() if side.documents < config.min_documents
    ]
    needed = f"a verdict needs {config.min_documents} on either side"
    remedy = "Gather more, or lower drift.min_documents."
    few = f"Too few documents: {' and '.join(short)}; {needed}. {remedy}" if short else ""
    if few:
        return _told(reference, new, config, INSUFFICIENT, few, seconds=seconds)
    splits = split(len(reference.measured), len(new.measured), splits=config.splits, seed=config.seed)
    both = together([reference.measured, new.measured])
    heads = [*reference.drawn.heads, *new.drawn.heads]
    columns, features = _columns(
        both, splits, heads, config, vocabulary=vocabulary, copies=_copies(reference, new, config)
    )
    rows, classifier = _judged(columns, features, config)
    verdict = DRIFT if any(row["verdict"] == DRIFT for row in rows) else NONE
    why = _why(rows, config)
    return _told(reference, new, config, verdict, why, seconds=seconds, rows=rows, classifier=classifier)


def _columns(
    both: Measured,
    splits: Splits,
    heads: Sequence[str],
    config: DriftConfig,
    *,
    vocabulary: Vocabulary | None,
    copies: NDArray[np.float32],
) -> tuple[list[Column], list[Feature]]:
    """All columns, and the words that the classifier goes by."""
    words, new = Kept.of(both.words), splits.new[0] > 0
    features = tell(words, new, heads)
    if vocabulary:
        kept = Kept.of(both.tokens)
        tokens = frequencies(kept, splits, title=TOKENS)
        columns = told_tokens(kept, new, vocabulary.written)
    else:
        tokens, columns = frequencies(words, splits, title=WORDS), features
    histogram = None
    if columns:
        labels, *counts = zip(*((each.feature, each.reference, each.new) for each in columns), strict=True)
        histogram = Histogram(labels, *counts)
    domain = Column("domain", DOMAIN, "area under the curve", areas(words.presence, splits, seed=config.seed))
    tokens = replace(tokens, histogram=histogram, moved=moved(histogram) if histogram else ())
    return [tokens, *measured_columns(both, splits, copies=copies), domain], features


def _judged(
    columns: list[Column], features: list[Feature], config: DriftConfig
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every column with its verdict, in the order of COLUMNS, and the classifier."""
    tested = [(column, column.values) for column in columns if column.values is not None]
    # Under `min_auc`, all areas are alike, those of random splits as well: trifles use up none of the false alarms.
    family = np.stack(
        [np.maximum(values, config.min_auc) if column.name == "domain" else values for column, values in tested], axis=1
    )
    judged = judge(family, config.false_alarm_rate)
    results = {
        column.name: (values, float(p), float(threshold))
        for (column, values), p, threshold in zip(tested, judged.p_values, judged.thresholds, strict=True)
    }
    rows = [_row(column, results.get(column.name), config) for column in columns]
    domain = next(row for row in rows if row["name"] == "domain")
    entries = [asdict(feature) for feature in features]
    return rows, {
        "auc": domain["value"],
        "threshold": domain["threshold"],
        "p_value": domain["p_value"],
        "features": entries,
    }


def _row(
    column: Column, result: tuple[NDArray[np.float64], float, float] | None, config: DriftConfig
) -> dict[str, Any]:
    values, p, threshold = result or (None, None, None)
    verdict = INSUFFICIENT if p is None else DRIFT if p <= config.false_alarm_rate else NONE
    histogram = column.histogram
    lists = {name: list(values) for name, values in vars(histogram).items()} if histogram else None
    return {
        "name": column.name,
        "title": column.title,
        "unit": column.unit,
        "value": None if values is None else float(values[0]),
        "threshold": threshold,
        "p_value": p,
        "verdict": verdict,
        "reference": column.reference,
        "new": column.new,
        "moved": list(column.moved),
        "histogram": lists,
        "null": [] if values is None else [round(float(value), 6) for value in values[1 : 1 + NULL_SHOWN]],
    }


def _copies(reference: Side, new: Side, config: DriftConfig) -> NDArray[np.float32]:
    """Whether each document is a copy of an earlier one, in corpora of one size.

    Twice as many documents have more copies by chance. So of the larger corpus a copy counts as often as one of those that it is
    a copy of would be in a random part of the other's size.
    """
    least = min(reference.drawn.documents, new.drawn.documents)
    random = np.random.default_rng(config.seed)
    results = []
    for side in (reference, new):
        missed = (1 - least / side.drawn.documents) ** side.drawn.earlier
        results.append(random.random(len(missed)) < np.where(side.drawn.earlier > 0, 1 - missed, 0.0))
    return np.concatenate(results).astype(np.float32)


def _count(side: Drawn) -> str:
    return f"{side.documents}" + (f" and {side.unreadable} lines that are none" if side.unreadable else "")


def _why(rows: list[dict[str, Any]], config: DriftConfig) -> str:
    moved = sorted((row for row in rows if row["verdict"] == DRIFT), key=lambda row: row["p_value"])
    tested = [row for row in rows if row["p_value"] is not None]
    rate = f"{config.false_alarm_rate:.3g} of windows of unchanged data would say so, over all columns together"
    if not moved:
        return (
            f"None of {len(tested)} columns is over its threshold (smallest corrected p {_smallest(rows):.3g}; {rate})."
        )
    text = "; ".join(_of_column(row) for row in moved)
    return f"{len(moved)} of {len(tested)} columns are over their thresholds ({rate}): {text}."


def _of_column(row: dict[str, Any]) -> str:
    most = f", {', '.join(row['moved'])}" if row["moved"] else ""
    return f"{row['name']} {row['value']:.4g} {row['unit']}, threshold {row['threshold']:.4g}{most}"


def _smallest(rows: list[dict[str, Any]]) -> float | None:
    return min((row["p_value"] for row in rows if row["p_value"] is not None), default=None)


def _told(
    reference: Side,
    new: Side,
    config: DriftConfig,
    verdict: str,
    why: str,
    *,
    seconds: dict[str, float],
    rows: list[dict[str, Any]] | None = None,
    classifier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    rows = rows or [_row(Column(name, title, "", None), None, config) for name, title in COLUMNS.items()]
    return {
        "schema": SCHEMA,
        "reference": reference.ref,
        "new": new.ref,
        "verdict": verdict,
        "why": why,
        "false_alarm_rate": config.false_alarm_rate,
        "splits": config.splits,
        "p_value": _smallest(rows),
        "documents": {
            "reference": reference.drawn.documents,
            "new": new.drawn.documents,
            "looked_at_reference": len(reference.measured),
            "looked_at_new": len(new.measured),
        },
        "bytes": {"reference": reference.drawn.bytes, "new": new.drawn.bytes},
        "columns": rows,
        "classifier": classifier,
        "seconds": seconds,
    }


# Drift of files against files: two corpora are read once, the documents that are looked at are measured, and both are
# compared.
#
# Processes share the units of both corpora and then the measuring. Memory does not grow with the corpora: a unit's
# hashes and the documents that are looked at (tasks/data/drift/sampling.py).


SLICE = 250
"""Documents that a process measures at once."""
SAMPLE = 64
"""Documents on which a tokenizer's fast engine must agree with the slow one."""


@dataclass(frozen=True)
class Corpus:
    """Files under the name that the evidence says."""

    ref: str
    shards: tuple[Shard, ...]


def drift_of(
    reference: Corpus,
    new: Corpus,
    config: DriftConfig,
    folder: Path,
    *,
    tokenizer: Path | None,
    text_field: str,
    workers: int,
    report: Callable[[int, str], None] = lambda read, doing: None,
    share: slice = EVERY,
) -> dict[str, Any]:
    """The new corpus against the reference, as drift.json says it; `parts` and `work` in the folder may be deleted afterwards.

    Others may read the units beside `share` (read_share below). `report` hears the bytes that were read, and what is being done.
    Raises ValueError when a file cannot be read on, or a folder holds no tokenizer.
    """
    began = time.perf_counter()
    drawn = draw(
        (reference.shards, new.shards),
        folder / PARTS,
        text_field=text_field,
        most=config.max_documents,
        seed=config.seed,
        workers=workers,
        report=lambda read: report(read, "read"),
        share=share,
    )
    seconds = {"read": time.perf_counter() - began}
    enough = min(each.documents for each in drawn) >= config.min_documents
    vocabulary = open_vocabulary(tokenizer, drawn[0].heads[:SAMPLE]) if tokenizer else None
    report(0, "measured")
    measured = _measure(drawn, vocabulary, folder / "work", workers=workers) if enough else [_none(), _none()]
    seconds["measure"] = time.perf_counter() - began - seconds["read"]
    report(0, "compared")
    old, now = (Side(c.ref, d, m) for c, d, m in zip((reference, new), drawn, measured, strict=True))
    made = compare(old, now, config, vocabulary=vocabulary, seconds=seconds)
    seconds["all"] = time.perf_counter() - began
    seconds["compare"] = seconds["all"] - seconds["read"] - seconds["measure"]
    return made


def read_share(
    reference: Corpus, new: Corpus, config: DriftConfig, folder: Path, *, text_field: str, workers: int, share: slice
) -> None:
    """Read a share of the units for the process that compares them."""
    corpora, place = (reference.shards, new.shards), folder / PARTS
    most, seed = config.max_documents, config.seed
    read_units(corpora, place, text_field=text_field, most=most, seed=seed, workers=workers, share=share)


def _measure(drawn: Sequence[Drawn], vocabulary: Vocabulary | None, folder: Path, *, workers: int) -> list[Measured]:
    """What is drawn, measured in slices by processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    slices = [(side, start) for side, each in enumerate(drawn) for start in range(0, len(each.heads), SLICE)]

    def do(item: tuple[int, int], report: Callable[[int], None]) -> None:
        side, start = item
        some = slice(start, start + SLICE)
        result = measure(drawn[side].heads[some], drawn[side].lengths[some], vocabulary)
        (folder / f"{side}-{start}").write_bytes(pickle.dumps(result))

    on_processes(slices, do, workers=workers)
    read = [(side, pickle.loads((folder / f"{side}-{start}").read_bytes())) for side, start in slices]
    return [together([part for of, part in read if of == side]) for side in range(len(drawn))]


def _none() -> Measured:
    return measure([], np.zeros(0, np.int64), None)
