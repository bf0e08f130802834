"""Dataset -> Validation: is this corpus fit to be trained on? Great Expectations judges: tasks/data/judging.py.

The program tasks/jobs/profile.py streams the corpus once into a profile of one row a document; the suites run on the profile,
in batches: what is expected of documents and of the corpus, and what a user expects of documents beside it. Documents that break
a rule go to the quarantine, and what is left is a new version of the dataset; of a large corpus the machines that profiled it
write both (tasks/jobs/divide.py). How they are found and written: tasks/data/corpus/; distances:
tasks/data/drift/histograms.py; who may bring data: tasks/data/admission.py. See docs/data.md.

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
from collections.abc import Mapping
from pathlib import Path

from tasks.artifacts import Artifact, Cluster, Dataset, Index, Quarantine, Validation
from tasks.config.data import ValidationConfig
from tasks.data import judging
from tasks.data.admission import refused
from tasks.data.corpus.dividing import Division, write_marks
from tasks.data.corpus.index import publishable
from tasks.data.corpus.quarantine import Profile
from tasks.data.judging import Judged, verdict
from tasks.data.suite import PAGES, Suite
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import at_work, attachment, fetch, manifest_of, publish, run_job, scratch
from tasks.signing.bundle import SIGNATURES

TIMES = ("seconds", "speed")
"""What columns.json says of its making, not of the corpus."""
DIVIDED_HERE = 8 << 30
"""Bytes of the largest corpus that this process divides by itself, in about a minute: a job may have to wait for its machines."""


@stage(
    version=2,
    shown=Shown(
        line="{documents:.0f} documents, {bytes:.0f} bytes",
        unless_zero={"quarantined": "{quarantined:.0f} set aside"},
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
        judging.require_judgeable(own, at_work().lifecycle.home)
    job = run_job(program(dataset, config, heldout_fraction, benchmarks, against, on=on), on=on)
    names = tuple(benchmark.name for benchmark in benchmarks)
    profile = Profile(job.output / "profile", names, split=heldout_fraction is not None)
    before = json.loads((fetch(reference) / "columns.json").read_text()) if reference else None
    strange, work = refused(*_origins(dataset), config.admission), at_work()
    work.lifecycle.observer.progress(
        work.stage, 0, 0, "judging: rules for each document, figures of the whole corpus", None
    )
    place = judging.Place(work.lifecycle.home, dataset.name, work.key[:16])
    refs: dict[str, str | None] = {"dataset": dataset.ref, "reference": reference.ref if reference else None}
    with scratch() as folder:
        (folder / "judged").mkdir()
        judged = judging.judge_apart(
            profile, config, before=before, strange=strange, own=own, place=place, folder=folder / "judged"
        )
        aside, left = _divide(dataset, judged, folder, Path(job.folder) / "marks", on=on)
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


def divide_program(dataset: Dataset, marks: Path, *, left: bool, on: Cluster) -> Program:
    """What divides a corpus by a folder of marks, which its machines see: one rank a machine, with its threads.

    Without `left`, only what is set aside is written.
    """
    settings = {"marks": str(marks), "left": left, "threads": on.threads_per_node}
    return Program("tasks.jobs.divide", settings, {"dataset": dataset})


def _origins(dataset: Dataset) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Of a dataset: sha256 by shard, the places that each was published from, the signatures beside it."""
    manifest = manifest_of(dataset)
    shards = {entry.path: entry.sha256 for entry in manifest.content.files}
    sources: dict[str, list[str]] = (manifest.provenance.model_extra or {}).get("sources", {})
    return shards, sources, json.loads(attachment(dataset, SIGNATURES) or b"[]")


def _divide(
    dataset: Dataset, judged: Judged, folder: Path, marks: Path, *, on: Cluster
) -> tuple[Quarantine | None, Dataset | None]:
    """Publish the quarantine and, when the gate is open, what is left: the dataset itself when nothing is set aside.

    Where machines share a folder with this one, those that profiled a large corpus divide it, by the `marks` in the folder of
    their job; what they wrote is taken over.
    """
    if not judged.quarantined["documents"]:
        return None, dataset
    profile = judged.profile
    if on.config.shares_folder and manifest_of(dataset).bytes > DIVIDED_HERE:
        write_marks(marks, profile.names, *judged.marked())
        folder = run_job(divide_program(dataset, marks, left=judged.passed, on=on), on=on, again="divide").output
    else:
        write_marks(folder / "marks", profile.names, *judged.marked())
        left = folder / "left" if judged.passed else None
        work = Division(fetch(dataset), folder / "marks", folder / "parts", left)
        for name in work.files:
            work.do(name)
        work.finish(folder / "aside")
    counts = {"quarantined": float(judged.quarantined["documents"])}
    made = publish(folder / "aside", Quarantine, name=dataset.name, metrics=counts, made_from=(dataset,))
    if not judged.passed:
        return made, None
    documents = {"documents": float(profile.documents - judged.gone.sum())}
    return made, publish(folder / "left", Dataset, name=dataset.name, metrics=documents, made_from=(dataset,))


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
