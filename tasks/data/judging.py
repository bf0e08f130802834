"""A profile of a corpus, judged by its suites: what is expected of documents, of the corpus, and a user's own.

Great Expectations judges (gx.py), with pandas and SciPy, which hold 250 MB for as long as their process lives. A flow run waits
for its training for weeks after it judged a corpus in seconds, so a stage has it done in a process of its own (`judge_apart`):

    python -m tasks.data.judging FOLDER

with `question.json` in the folder. The answer is `answer.json` there, and `bits.npy`, the rules that each document breaks.
What came of it, and `validation.json`, which tells it to a report page, are values below; what is made of the verdict, and the
keys of that file, are tasks/validate.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Check
from tasks.config.data import ValidationConfig
from tasks.data import expectations
from tasks.data.corpus.dividing import Marked
from tasks.data.corpus.quarantine import (
    BORDER,
    PARTNERS,
    Columns,
    Places,
    Profile,
    Teller,
    mark,
    mark_unreadable,
    samples_of,
)
from tasks.data.drift.histograms import Drift, drifts, outliers
from tasks.data.expectations import INSUFFICIENT, SAMPLES, DocumentRule, Figure
from tasks.data.suite import FOLDER, Suite, title

Bits = NDArray[np.uint16]
"""Of each document, the rules that it breaks: one bit a rule."""


TOTALS = (
    "documents",
    "unreadable",
    "characters",
    "bytes",
    "tokens",
    "near",
    "contaminated",
    "heldout",
)


TYPES = ("secret_types", "personal_types")


SOMETIMES = ("known", "benchmark_documents_too_short")
"""Where earlier corpora are named; in profiles since it is counted."""


OF_A_SHARD = ("name", "documents", "unreadable", "bytes", "characters", "duplicates", "near", "secrets", "personal")


@dataclass(frozen=True)
class Judged:
    """What came of judging a profile."""

    profile: Profile
    checks: tuple[Check, ...]
    rules: list[DocumentRule]
    bits: Bits
    wanted: tuple[str, ...]
    """Rules whose offenders are set aside."""
    drift: list[Drift]
    apart: dict[str, Drift]
    strange: Mapping[str, str]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @cached_property
    def gone(self) -> NDArray[np.bool_]:
        """The rows that are set aside."""
        return np.asarray(self.bits & mask_of(self.rules, self.wanted) != 0)

    @cached_property
    def quarantined(self) -> dict[str, int]:
        """How many lines are set aside, and how many by each rule."""
        counts: dict[str, int] = {
            r.name: int((self.bits >> n & 1).sum()) for n, r in enumerate(self.rules) if r.name in self.wanted
        }
        broken = int(self.profile.columns["unreadable"]) if "unreadable" in self.wanted else 0
        payload = {name: count for name, count in {**counts, "unreadable": broken}.items() if count}
        return {"documents": int(self.gone.sum()) + broken, **payload}

    def marked(self) -> Iterator[Iterator[Marked]]:
        """What is set aside, as streams of lines."""
        rows = ((row, self._broken(row["row"])) for row in self.profile.rows(self.gone))
        yield mark(rows, Teller(self.profile, self.profile.rows(self.gone)))
        if "unreadable" in self.wanted:
            yield mark_unreadable(self.profile)

    def _broken(self, row: int) -> tuple[str, ...]:
        met = int(self.bits[row])
        return tuple(r.name for n, r in enumerate(self.rules) if met >> n & 1 and r.name in self.wanted)


def verdict(judged: Judged, refs: Mapping[str, str | None]) -> dict[str, Any]:
    """The content of `validation.json`; `refs` name the artifacts that it speaks of."""
    profile = judged.profile
    columns = profile.columns
    # A histogram without the empty bins at both ends
    histogram = columns["histograms"]["characters"]
    edges, counts = histogram["edges"], histogram["counts"]
    met = [index for index, count in enumerate(counts) if count] or [0]
    first, last = met[0], met[-1]
    shown = {"edges": list(edges[first : last + 2]), "counts": list(counts[first : last + 1])}
    return {
        **{key: columns[key] for key in (*TOTALS, *TYPES)},
        "duplicates": columns["exact"],
        **{key: columns[key] for key in SOMETIMES if key in columns},
        "lengths": shown,
        "classes": shares(columns["classes"]),
        "passed": judged.passed,
        "checks": [check.model_dump(mode="json") for check in judged.checks],
        "quarantine": judged.quarantined,
        "shards": [_shard(shard, judged) for shard in profile.shards],
        "drift": [{"column": d.column, "distance": d.distance, "moved": list(d.moved)} for d in judged.drift],
        **refs,
    }


def mask_of(rules: Sequence[DocumentRule], wanted: Sequence[str]) -> np.uint16:
    """The bits of some rules."""
    return np.uint16(sum(1 << bit for bit, rule in enumerate(rules) if rule.name in wanted))


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts as shares of their sum."""
    total = sum(counts.values()) or 1
    return {name: count / total for name, count in counts.items()}


def _shard(shard: Columns, judged: Judged) -> dict[str, Any]:
    far = judged.apart.get(shard["name"])
    return {
        **{key: shard[key] for key in OF_A_SHARD},
        "divergence": far.distance if far else None,
        "farthest": far.column if far else None,
        "refused": judged.strange.get(shard["name"]),
    }


if TYPE_CHECKING:
    from tasks.data import gx


ERROR_CHARACTERS = 2000
"""Of the end of what a process wrote that judged nothing."""


@dataclass(frozen=True)
class Place:
    """Where Great Expectations keeps what it judged, and under which names."""

    home: Path
    dataset: str
    run: str
    """The name of this run in its results."""


def judge(
    profile: Profile,
    config: ValidationConfig,
    *,
    before: Columns | None,
    strange: Mapping[str, str],
    own: Suite | None = None,
    place: Place | None = None,
) -> Judged:
    """Judge a profile by the suites: one check an expectation. Two bytes a document are held, and one batch of rows.

    Without a place nothing is kept.
    """
    from tasks.data import gx

    rules = expectations.document_rules(config, benchmarks=bool(profile.benchmarks))
    name = place.dataset if place else "corpus"
    documents = gx.Stream(gx.rules_suite(f"{name}-documents", rules, config.only_warn))
    users = gx.Stream(gx.own_suite(f"{name}-{own.name}", own, place.home)) if own and place else None
    bits, breaking = examine(profile, rules, documents, users)
    gone = bits & mask_of(rules, config.quarantine) != 0
    fewest = config.min_drift_documents
    drift = drifts(profile.columns, before, fewest=fewest) if before else []
    apart = outliers(profile.shards, fewest=fewest)
    left = profile.documents - int(gone.sum())
    first = islice(profile.unreadable(), SAMPLES)
    samples = tuple(f"{profile.names[item['shard']]}:{item['line']}: {item['reason']}" for item in first)
    unreadable = expectations.of_unreadable(config, int(profile.columns["unreadable"]), profile.documents, samples)
    figures = [
        *expectations.of_size(config, documents=profile.documents, left=left, tokens=profile.columns["tokens"]),
        unreadable,
        *_documents(profile, rules, bits),
        *([_border(profile, gone)] if profile.split else []),
        *expectations.of_classes(config, shares(profile.columns["classes"])),
        expectations.of_shards(config, apart),
        *expectations.of_drift(config, drift),
        expectations.of_admission(strange),
    ]
    corpus = gx.Stream(gx.figures_suite(f"{name}-corpus", figures, config.only_warn), "corpus")
    list(corpus.add(gx.one_row(figures)))
    streams = [corpus, documents, *([users] if users else [])]
    folder = place.home / FOLDER if place else None
    kept, _, *theirs = gx.checkpoint(name, streams, folder, place.run if place else "run")
    checks = [_check(f, result.success, f.name in config.only_warn) for f, result in zip(figures, kept, strict=True)]
    checks += _own_checks(profile, theirs[0], breaking) if theirs else []
    return Judged(profile, tuple(checks), rules, bits, config.quarantine, drift, apart, strange)


def examine(
    profile: Profile, rules: Sequence[DocumentRule], documents: gx.Stream, users: gx.Stream | None
) -> tuple[Bits, list[list[int]]]:
    """Take every document into the streams, batch by batch: the rules that each breaks, and of each expectation of the user's
    the first rows that break it."""
    bits: Bits = np.zeros(profile.documents, np.uint16)
    breaking: list[list[int]] = [[] for _ in users.suite.expectations] if users else []
    columns = None if users else {rule.column: None for rule in rules}
    for first, batch in profile.batches(columns):
        frame = batch.to_pandas()
        for number, rows in enumerate(documents.add(frame)):
            bits[rows + first] |= np.uint16(1 << number)
        for known, rows in zip(breaking, users.add(frame) if users else (), strict=True):
            known += (rows[: SAMPLES - len(known)] + first).tolist()
    return bits, breaking


def _own_checks(profile: Profile, results: Sequence[Any], breaking: Sequence[list[int]]) -> list[Check]:
    """A check for each expectation of the user's; its severity says whether it closes the gate."""
    places = Places(profile, (row for rows in breaking for row in rows))
    checks = []
    for result, rows in zip(results, breaking, strict=True):
        config, outcome = result.expectation_config, result.result
        closes = config.severity == "critical"
        share, observed = outcome.get("unexpected_percent"), outcome.get("observed_value")
        limits = (
            f"{key} {value:.12g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in config.kwargs.items()
            if not key.startswith(("column", "batch_id"))
        )
        checks.append(
            Check(
                name=title(config),
                measured=float(share or 0) / 100 if "unexpected_percent" in outcome else _plain(observed),
                limit=", ".join(limits) or "every document",
                passed=result.success or not closes,
                warned=(not closes and not result.success) or bool(result.success and outcome.get("unexpected_count")),
                remedy="Look at these documents, or change the suite that validation.suite names.",
                count=outcome.get("unexpected_count"),
                samples=tuple(places[row] for row in rows),
            )
        )
    return checks


def _plain(observed: Any) -> float | str:
    """An observed value as a number, where it is one."""
    try:
        value = float(observed)
    except (TypeError, ValueError):
        return str(observed)
    return INSUFFICIENT if np.isnan(value) else value


def _check(figure: Figure, kept: bool, only_warn: bool) -> Check:
    return Check(
        name=figure.name,
        measured=INSUFFICIENT if figure.value is None else float(figure.value),
        limit=figure.limit,
        passed=kept or only_warn,
        warned=(kept or only_warn) and (figure.found or not kept),
        remedy=figure.remedy,
        count=figure.count,
        samples=figure.samples,
    )


def _documents(profile: Profile, rules: Sequence[DocumentRule], bits: Bits) -> list[Figure]:
    """The share of documents that break each rule, with the first few."""
    broken = {rule.name: np.flatnonzero(bits >> number & 1) for number, rule in enumerate(rules)}
    payload = samples_of(profile, {name: rows[:SAMPLES].tolist() for name, rows in broken.items()})
    return [expectations.of_rule(r, len(broken[r.name]), profile.documents, payload[r.name]) for r in rules]


def _border(profile: Profile, gone: NDArray[np.bool_]) -> Figure:
    """Repetitions across the held-out border: a model would be measured on what it has read."""
    heldout = np.zeros(profile.documents, bool)
    results: list[int] = []
    count = left = 0
    for first, batch in profile.batches(("heldout", *PARTNERS)):
        column = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}
        rows = np.arange(first, first + batch.num_rows)
        heldout[rows] = column["heldout"]
        partners = np.where(column["exact_of"] >= 0, column["exact_of"], column["near_of"])
        crosses = (partners >= 0) & (partners < len(heldout))  # a document of an earlier corpus is on no side
        crosses[crosses] = heldout[rows[crosses]] != heldout[partners[crosses]]
        stay = ~gone[rows[crosses]] & ~gone[partners[crosses]]
        count, left = count + int(crosses.sum()), left + int(stay.sum())
        results += rows[crosses][: SAMPLES - len(results)].tolist()
    return expectations.of_border(count, left, samples_of(profile, {BORDER: results})[BORDER])


def require_judgeable(own: Suite, home: Path) -> None:
    """Raise ValueError for an expectation of a user's suite that cannot be judged over a stream."""
    with tempfile.TemporaryDirectory(prefix="headway-suite-") as folder:
        _answer({"own": _suite(own), "home": str(home)}, Path(folder))


def judge_apart(
    profile: Profile,
    config: ValidationConfig,
    *,
    before: Columns | None,
    strange: Mapping[str, str],
    own: Suite | None,
    place: Place,
    folder: Path,
) -> Judged:
    """What `judge` gives, by a process that ends with it; `folder` is an empty one for both sides. Raises ValueError."""
    question = {
        "profile": {"folder": str(profile.folder), "benchmarks": profile.benchmarks, "split": profile.split},
        "config": config.model_dump(mode="json", exclude={"suite"}),
        "before": before,
        "strange": dict(strange),
        "own": _suite(own) if own else None,
        "home": str(place.home),
        "place": {"dataset": place.dataset, "run": place.run},
    }
    answer = _answer(question, folder)
    return Judged(
        profile,
        tuple(Check.model_validate(check) for check in answer["checks"]),
        expectations.document_rules(config, benchmarks=bool(profile.benchmarks)),
        np.load(folder / "bits.npy"),
        config.quarantine,
        [_drift(each) for each in answer["drift"]],
        {name: _drift(each) for name, each in answer["apart"].items()},
        strange,
    )


def _suite(own: Suite) -> dict[str, Any]:
    return {"name": own.name, "expectations": list(own.expectations), "code": dict(own.code)}


def _drift(fields: dict[str, Any]) -> Drift:
    return Drift(**{**fields, "moved": tuple(fields["moved"])})


def _answer(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Have a question answered by this file as a program. Raises ValueError for a mistake of the user's."""
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    argv = [sys.executable, "-P", "-m", "tasks.data.judging", str(folder)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    answer = folder / "answer.json"
    if not answer.exists():
        raise RuntimeError(
            f"the process that judges a corpus ended with code {done.returncode}: {done.stderr.strip()[-ERROR_CHARACTERS:]}"
        )
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "mistake" in result:
        raise ValueError(result["mistake"])
    return result


def main(folder: Path) -> None:
    """Answer the question that lies in a folder."""
    question = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    try:
        result = _judged(question, folder)
    except ValueError as error:
        result = {"mistake": str(error)}
    draft = folder / "answer.json.new"
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.rename(folder / "answer.json")


def _judged(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    home, own = Path(question["home"]), None
    if fields := question["own"]:
        own = Suite(fields["name"], tuple(fields["expectations"]), fields["code"])
    if "profile" not in question:
        from tasks.data import gx

        assert own is not None, "a suite is what is asked about where no profile is"
        gx.own_suite(own.name, own, home)
        return {}
    corpus = question["profile"]
    judged = judge(
        Profile(Path(corpus["folder"]), tuple(corpus["benchmarks"]), split=corpus["split"]),
        ValidationConfig.model_validate(question["config"]),
        before=question["before"],
        strange=question["strange"],
        own=own,
        place=Place(home, question["place"]["dataset"], question["place"]["run"]),
    )
    np.save(folder / "bits.npy", judged.bits)
    return {
        "checks": [check.model_dump() for check in judged.checks],
        "drift": [asdict(each) for each in judged.drift],
        "apart": {name: asdict(each) for name, each in judged.apart.items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
