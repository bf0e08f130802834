"""`headway drift`: any two datasets, files or folders, compared in this process; nothing is published or started.

What is measured: tasks/drift. See docs/drift.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.data.preprocess import cores
from deployments.cli.options import Json, Set
from deployments.cli.output import say, short_ref

if TYPE_CHECKING:
    from tasks.data.drift.comparison import Corpus

MARKS = {"drift": "DRIFT", "none": "ok", "insufficient": "-"}


def drift(
    reference: Annotated[str, typer.Argument(help="What is known: NAME, dataset/NAME@VERSION, or a file or folder.")],
    new: Annotated[str, typer.Argument(help="What is asked about, in the same way.")],
    tokenizer: Annotated[
        str, typer.Option(help="KIND/NAME[@VERSION] of a tokenizer, tokens or checkpoint, or a folder.  [words]")
    ] = "",
    text_field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say whether new data has drifted from a reference, by what, and how sure that is.

    `--set drift.false_alarm_rate=0.01` and the other settings of docs/configuration.md hold. A name that is a dataset's and a
    file's means the dataset; write ./NAME for the file.
    """
    from deployments.configuration.files import changed
    from tasks.config.revalidation import RevalidationConfig
    from tasks.data.drift.comparison import drift_of

    config = changed(RevalidationConfig, set_ or ()).drift
    corpora = [_corpus(name) for name in (reference, new)]
    folder = _folder(tokenizer) if tokenizer else None
    with tempfile.TemporaryDirectory() as work:
        result = drift_of(
            corpora[0], corpora[1], config, Path(work), tokenizer=folder, text_field=text_field, workers=cores()
        )
    say({"drift": result}, _words(result), as_json=as_json)


def _corpus(name: str) -> Corpus:
    """A dataset of the store, or else files. Raises Unknown, ValueError."""
    from tasks.common.errors import Unknown
    from tasks.data.corpus.inputs import find_shards
    from tasks.data.drift.comparison import Corpus

    path = Path(name)
    try:
        ref, folder = _fetched(name, kind="dataset")
    except (Unknown, ValueError):
        if not path.exists():
            raise
        ref, folder = str(path), path
    return Corpus(ref, tuple(find_shards([folder])))


def _folder(tokenizer: str) -> Path:
    return Path(tokenizer) if Path(tokenizer).exists() else _fetched(tokenizer, kind="")[1]


def _fetched(name: str, *, kind: str) -> tuple[str, Path]:
    """An artifact of the store, every byte checked. Raises Unknown, ValueError."""
    from tasks.artifacts import parse_ref
    from tasks.common.home import home
    from tasks.security.access import note_access
    from tasks.storage import open_store
    from tasks.storage.store import find

    store = open_store(home())
    manifest = find(store, *(parse_ref(name, kind=kind) if kind else parse_ref(name)))
    note_access(home(), manifest.ref, bytes=manifest.bytes, what="drift")
    return manifest.ref, store.fetch(manifest)


def _words(result: dict[str, Any]) -> str:
    counts, rate = result["documents"], result["false_alarm_rate"]
    rows = [("column", "verdict", "value", "threshold", "p", "what moved")]
    for column in result["columns"]:
        figures = (_number(column[key]) for key in ("value", "threshold", "p_value"))
        rows.append((column["name"], MARKS[column["verdict"]], *figures, ", ".join(column["moved"])))
    widths = [max(len(row[place]) for row in rows) for place in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    ]
    features = (result["classifier"] or {}).get("features", [])
    words = ", ".join(f"{each['feature']} {each['reference']:.1%} -> {each['new']:.1%}" for each in features[:8])
    return "\n".join(
        [
            f"{result['verdict']}: {result['why']}",
            f"{short_ref(result['reference'])}: {counts['reference']} documents, {counts['looked_at_reference']} looked at; "
            f"{short_ref(result['new'])}: {counts['new']} documents, {counts['looked_at_new']} looked at; "
            f"{result['splits']} splits, false-alarm rate {rate:g}",
            *lines,
            *([f"Words that tell them apart, by documents: {words}"] if result["verdict"] == "drift" and words else []),
        ]
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
