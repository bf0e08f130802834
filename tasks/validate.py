"""Dataset -> Validation: is this corpus fit to be trained on? Great Expectations judges; this is its only home.

The program tasks/jobs/profile.py streams the corpus once into a profile of one row a document; the suite runs on the profile,
in batches. Documents that break a rule go to the quarantine, and what is left is a new version of the dataset. How they are
found and written: tasks/data/corpus/; distances: tasks/data/drift/histograms.py; who may bring data: tasks/data/admission.py.
See docs/data.md.

`validation.json`: documents, unreadable, characters, bytes, tokens (estimated), duplicates, near, contaminated, heldout,
lengths{edges, counts}, classes{name: share}, passed, checks[{name, measured, limit, passed, warned, count, samples, remedy}],
quarantine{documents, RULE: count}, shards[{name, documents, unreadable, bytes, characters, duplicates, near, secrets, personal,
divergence, farthest, refused}], drift[{column, distance, moved}], secret_types, personal_types, dataset, accepted,
quarantined, reference. `columns.json` lies beside it, for the next version's drift. Neither holds a time: the same verdict is the
same version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Artifact, Check, Cluster, Dataset, Quarantine, Validation
from tasks.config.data import ValidationConfig
from tasks.data import expectations
from tasks.data.admission import refused
from tasks.data.corpus.quarantine import BORDER, PARTNERS, Columns, Profile, rewrite, samples_of, write
from tasks.data.drift.histograms import drifts, outliers
from tasks.data.expectations import INSUFFICIENT, SAMPLES, DocumentRule, Figure
from tasks.data.verdict import Bits, Judged, mask_of, shares, verdict
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import attachment, fetch, manifest_of, publish, run_job, scratch
from tasks.signing.bundle import SIGNATURES

TIMES = ("seconds", "speed")
"""What columns.json says of its making, not of the corpus."""


@stage(
    version=2,
    shown=Shown(
        line="{documents:.0f} documents, {bytes:.0f} bytes",
        metrics=("documents", "bytes", "quarantined", "warnings"),
        headlines=("documents",),
        part="validation.json",
    ),
)
def validate(
    dataset: Dataset,
    config: ValidationConfig,
    reference: Validation | None,
    heldout_fraction: float | None,
    benchmarks: tuple[Dataset, ...],
    *,
    on: Cluster,
) -> Validation:
    """Profile a dataset and judge it by the suite; `reference` is the verdict that accepted the version before it."""
    job = run_job(program(dataset, config, heldout_fraction, benchmarks, on=on), on=on)
    names = tuple(benchmark.name for benchmark in benchmarks)
    profile = Profile(job.output / "profile", names, split=heldout_fraction is not None)
    before = json.loads((fetch(reference) / "columns.json").read_text()) if reference else None
    judged = judge(profile, config, before=before, strange=refused(*_origins(dataset), config.admission))
    refs: dict[str, str | None] = {"dataset": dataset.ref, "reference": reference.ref if reference else None}
    with scratch() as folder:
        aside, left = _divide(dataset, judged, folder)
        refs |= {"accepted": left.ref if left and judged.passed else None, "quarantined": aside.ref if aside else None}
        _write(folder / "verdict", judged, refs)
        handed = (dataset, *((reference,) if reference else ()), *benchmarks, *((aside,) if aside else ()))
        return publish(
            folder / "verdict",
            Validation,
            name=dataset.name,
            metrics=_metrics(judged),
            made_from=handed,
            checks=judged.checks,
            subject=left or dataset,
        )


def judge(profile: Profile, config: ValidationConfig, *, before: Columns | None, strange: Mapping[str, str]) -> Judged:
    """Run the suite on a profile: one check an expectation. Two bytes a document are held, and one batch of rows."""
    rules = expectations.document_rules(config, benchmarks=bool(profile.benchmarks))
    bits = examine(profile, rules)
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
    checks = tuple(_check(f, kept, f.name in config.only_warn) for f, kept in zip(figures, hold(figures), strict=True))
    return Judged(profile, checks, rules, bits, config.quarantine, drift, apart, strange)


def examine(profile: Profile, rules: Sequence[DocumentRule]) -> Bits:
    """Great Expectations on every document, batch by batch: one expectation a rule."""
    bits: Bits = np.zeros(profile.documents, np.uint16)
    suite, batches = _suite([(r.name, r.column, r.low, r.high) for r in rules])
    bit = {str(rule.name): np.uint16(1 << number) for number, rule in enumerate(rules)}
    for first, batch in profile.batches({rule.column: None for rule in rules}):
        for name, result in _results(suite, batches, batch.to_pandas()):
            rows = np.asarray(result.get("unexpected_index_list") or [], np.int64)
            bits[rows + first] |= bit[name]
    return bits


def hold(figures: Sequence[Figure]) -> list[bool]:
    """Great Expectations on the corpus as one row: whether each figure keeps its limits."""
    import pandas as pd

    names = [f"{number} {figure.name}" for number, figure in enumerate(figures)]
    row = {name: [np.nan if f.value is None else float(f.value)] for name, f in zip(names, figures, strict=True)}
    suite, batches = _suite([(name, name, f.low, f.high) for name, f in zip(names, figures, strict=True)])
    missed = {name: result["unexpected_count"] for name, result in _results(suite, batches, pd.DataFrame(row))}
    return [not missed[name] for name in names]


def _suite(bounds: Sequence[tuple[str, str, float | None, float | None]]) -> tuple[Any, Any]:
    """A suite of expectations by name, column and bounds, and what makes batches of frames."""
    gx, no_other_document = _library()
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}

    def expectation(name: str, column: str, low: float | None, high: float | None) -> Any:
        meta = {"name": name}
        if high == -1:
            return no_other_document(column=column, meta=meta)
        return gx.expectations.ExpectColumnValuesToBeBetween(column=column, min_value=low, max_value=high, meta=meta)

    suite = gx.ExpectationSuite(name="corpus", expectations=[expectation(*each) for each in bounds])
    asset = context.data_sources.add_pandas("corpus").add_dataframe_asset("profile")
    return suite, asset.add_batch_definition_whole_dataframe("batch")


@cache
def _library() -> tuple[Any, Any]:
    """Great Expectations, which takes seconds to import, and our own expectation, which may be registered once."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    class ExpectNoOtherDocument(gx.expectations.ExpectColumnValuesToBeBetween):  # type: ignore[misc]
        """The column names another document, of the corpus or of a benchmark, by its number; it must name none (-1)."""

        max_value: float = -1
        description: str = "No other document, here or in a benchmark, is the same."

    return gx, ExpectNoOtherDocument


def _results(suite: Any, batches: Any, frame: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    payload = {"result_format": "COMPLETE", "return_unexpected_index_query": False}
    for result in batches.get_batch({"dataframe": frame}).validate(suite, result_format=payload).results:
        assert not result.exception_info.get("raised_exception"), result.exception_info
        yield result.expectation_config.meta["name"], result.result


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
        crosses = (partners >= 0) & (heldout[rows] != heldout[partners])
        count, left = count + int(crosses.sum()), left + int((crosses & ~gone[rows] & ~gone[partners]).sum())
        results += rows[crosses][: SAMPLES - len(results)].tolist()
    return expectations.of_border(count, left, samples_of(profile, {BORDER: results})[BORDER])


def program(
    dataset: Dataset, config: ValidationConfig, heldout: float | None, benchmarks: tuple[Dataset, ...], *, on: Cluster
) -> Program:
    """What profiles a corpus, on one machine with all of its threads. Raises ValueError for a benchmark that is named twice."""
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"validation.benchmarks names one dataset twice: {', '.join(names)}")
    settings = {
        "validation": config.model_dump(mode="json"),
        "heldout_fraction": heldout or 0.0,
        "benchmarks": names,
        "threads": on.threads_per_node,
    }
    inputs: dict[str, Artifact] = {"dataset": dataset, **{f"benchmark-{each.name}": each for each in benchmarks}}
    return Program("tasks.jobs.profile", settings, inputs, ranks=1, threads=on.threads_per_node)


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
