"""Dataset -> Validation: is this corpus fit to be trained on? Great Expectations judges, in tasks/data/gx.py.

The program tasks/jobs/profile.py streams the corpus once into a profile of one row a document; the suites run on the profile,
in batches: what is expected of documents and of the corpus, and what a user expects of documents beside it. Documents that break
a rule go to the quarantine, and what is left is a new version of the dataset. How they are found and written:
tasks/data/corpus/; distances: tasks/data/drift/histograms.py; who may bring data: tasks/data/admission.py.
See docs/data.md.

`validation.json`: documents, unreadable, characters, bytes, tokens (estimated), duplicates, near, contaminated, heldout,
lengths{edges, counts}, classes{name: share}, passed, checks[{name, measured, limit, passed, warned, count, samples, remedy}],
quarantine{documents, RULE: count}, shards[{name, documents, unreadable, bytes, characters, duplicates, near, secrets, personal,
divergence, farthest, refused}], drift[{column, distance, moved}], secret_types, personal_types, dataset, accepted,
quarantined, reference; known (documents that repeat earlier corpora's) and index, where they are asked for. Beside it lie
`columns.json`, for the next version's drift, and `suite.json`, the user's suite, where there is one. None holds a time: the same
verdict is the same version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Artifact, Check, Cluster, Dataset, Index, Quarantine, Validation
from tasks.config.data import ValidationConfig
from tasks.data import expectations
from tasks.data.admission import refused
from tasks.data.corpus.index import publishable
from tasks.data.corpus.quarantine import BORDER, PARTNERS, Columns, Places, Profile, rewrite, samples_of, write
from tasks.data.drift.histograms import drifts, outliers
from tasks.data.expectations import INSUFFICIENT, SAMPLES, DocumentRule, Figure
from tasks.data.suite import FOLDER, PAGES, Suite, title
from tasks.data.verdict import Bits, Judged, mask_of, shares, verdict
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import at_work, attachment, fetch, manifest_of, publish, run_job, scratch
from tasks.signing.bundle import SIGNATURES

if TYPE_CHECKING:
    from tasks.data import gx

TIMES = ("seconds", "speed")
"""What columns.json says of its making, not of the corpus."""


@stage(
    version=2,
    shown=Shown(
        line="{documents:.0f} documents, {bytes:.0f} bytes",
        metrics=("documents", "bytes", "quarantined", "warnings"),
        headlines=("documents",),
        part="validation.json",
        pages=PAGES,
    ),
)
def validate(
    dataset: Dataset,
    config: ValidationConfig,
    reference: Validation | None,
    heldout_fraction: float | None,
    benchmarks: tuple[Dataset, ...],
    suite: str | None = None,
    against: tuple[Index, ...] = (),
    *,
    on: Cluster,
    own: Suite | None = None,
) -> Validation:
    """Profile a dataset and judge it by the suites; `reference` is the verdict that accepted the version before it.

    `own` is the user's suite, and `suite` its digest, by which a verdict is reused; `against` are earlier corpora, whose
    documents must not come again. Raises ValueError for an expectation of it
    that cannot be judged, before anything of the dataset is read.
    """
    assert (own.digest if own else None) == suite, "a verdict is recorded under the suite that gave it"
    if own:
        from tasks.data import gx

        gx.own_suite(own.name, own, at_work().lifecycle.home)
    job = run_job(program(dataset, config, heldout_fraction, benchmarks, against, on=on), on=on)
    names = tuple(benchmark.name for benchmark in benchmarks)
    profile = Profile(job.output / "profile", names, split=heldout_fraction is not None)
    before = json.loads((fetch(reference) / "columns.json").read_text()) if reference else None
    strange, work = refused(*_origins(dataset), config.admission), at_work()
    work.lifecycle.observer.progress(
        work.stage, 0, 0, "judging: rules for each document, figures of the whole corpus", None
    )
    place = Place(work.lifecycle.home, dataset.name, work.key[:16])
    judged = judge(profile, config, before=before, strange=strange, own=own, place=place)
    refs: dict[str, str | None] = {"dataset": dataset.ref, "reference": reference.ref if reference else None}
    with scratch() as folder:
        aside, left = _divide(dataset, judged, folder)
        refs |= {"accepted": left.ref if left and judged.passed else None, "quarantined": aside.ref if aside else None}
        index = _publish_index(dataset, judged, folder) if config.index and judged.passed else None
        refs |= {"index": index.ref} if index else {}
        _write(folder / "verdict", judged, refs)
        if own:
            (folder / "verdict" / "suite.json").write_text(own.text, encoding="utf-8")
        handed = (dataset, *((reference,) if reference else ()), *benchmarks, *((aside,) if aside else ()))
        handed += (*against, *((index,) if index else ()))
        return publish(
            folder / "verdict",
            Validation,
            name=dataset.name,
            metrics=_metrics(judged),
            made_from=handed,
            checks=judged.checks,
            subject=left or dataset,
        )


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
    figures = [
        *expectations.of_size(config, documents=profile.documents, left=left, tokens=profile.columns["tokens"]),
        _unreadable(profile, config),
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


def _unreadable(profile: Profile, config: ValidationConfig) -> Figure:
    first = islice(profile.unreadable(), SAMPLES)
    samples = tuple(f"{profile.names[item['shard']]}:{item['line']}: {item['reason']}" for item in first)
    return expectations.of_unreadable(config, int(profile.columns["unreadable"]), profile.documents, samples)


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


def program(
    dataset: Dataset,
    config: ValidationConfig,
    heldout: float | None,
    benchmarks: tuple[Dataset, ...],
    against: tuple[Index, ...] = (),
    *,
    on: Cluster,
) -> Program:
    """What profiles a corpus: one rank a machine, with its threads. Raises ValueError for a name that comes twice."""
    names, earlier = [each.name for each in benchmarks], [each.name for each in against]
    for setting, kind, given in (("benchmarks", "dataset", names), ("against", "index", earlier)):
        if len(set(given)) < len(given):
            raise ValueError(f"validation.{setting} names one {kind} twice: {', '.join(given)}")
    settings = {
        "validation": config.model_dump(mode="json", exclude={"suite"}),
        "heldout_fraction": heldout or 0.0,
        "benchmarks": names,
        "threads": on.threads_per_node,
        "shared_folder": on.config.shares_folder,
    }
    if earlier:
        settings["against"] = earlier
    inputs: dict[str, Artifact] = {"dataset": dataset, **{f"benchmark-{each.name}": each for each in benchmarks}}
    inputs |= {f"index-{each.name}": each for each in against}
    return Program("tasks.jobs.profile", settings, inputs)


def _origins(dataset: Dataset) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Of a dataset: sha256 by shard, the places that each was published from, the signatures beside it."""
    manifest = manifest_of(dataset)
    shards = {entry.path: entry.sha256 for entry in manifest.content.files}
    sources: dict[str, list[str]] = (manifest.provenance.model_extra or {}).get("sources", {})
    return shards, sources, json.loads(attachment(dataset, SIGNATURES) or b"[]")


def _divide(dataset: Dataset, judged: Judged, folder: Path) -> tuple[Quarantine | None, Dataset | None]:
    """Publish the quarantine and, when the gate is open, what is left: the dataset itself when nothing is set aside."""
    if not judged.quarantined["documents"]:
        return None, dataset
    profile, corpus = judged.profile, fetch(dataset)
    aside, left = folder / "aside", folder / "left"
    aside.mkdir()
    gone = write(corpus, aside, profile.names, *judged.marked())
    counts = {"quarantined": float(judged.quarantined["documents"])}
    made = publish(aside, Quarantine, name=dataset.name, metrics=counts, made_from=(dataset,))
    if not judged.passed:
        return made, None
    rewrite(corpus, left, gone)
    documents = {"documents": float(profile.documents - judged.gone.sum())}
    return made, publish(left, Dataset, name=dataset.name, metrics=documents, made_from=(dataset,))


def _publish_index(dataset: Dataset, judged: Judged, folder: Path) -> Index:
    """Publish what later corpora are compared with: the documents that are not set aside."""
    profile, target = judged.profile, folder / "index"
    documents = publishable(profile.folder / "index", target, gone=judged.gone, shards=profile.names)
    return publish(target, Index, name=dataset.name, metrics={"documents": float(documents)}, made_from=(dataset,))


def _write(folder: Path, judged: Judged, refs: Mapping[str, str | None]) -> None:
    folder.mkdir()
    (folder / "validation.json").write_text(json.dumps(verdict(judged, refs), indent=1))
    timeless = {key: value for key, value in judged.profile.columns.items() if key not in TIMES}
    (folder / "columns.json").write_text(json.dumps(timeless))


def _metrics(judged: Judged) -> dict[str, float]:
    columns = judged.profile.columns
    return {
        **{key: float(columns[key]) for key in ("documents", "bytes")},
        "quarantined": float(judged.quarantined["documents"]),
        "warnings": float(sum(check.warned for check in judged.checks)),
        "megabytes_per_second": columns["bytes"] / 1e6 / max(columns["seconds"]["wall"], 1e-9),
    }
