"""`headway validate` and `drift`: data judged by itself, and compared with other data.

What breaks a rule is set aside. Drift is between any two datasets, files or folders, compared in this process; nothing is
published or started. See docs/data.md and docs/drift.md.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.data.preprocess import cores
from deployments.cli.data.publishing import make_version
from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set, parameters_of
from deployments.cli.output import aligned, say, short_number, short_ref
from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.config.revalidation import RevalidationConfig
from tasks.data.corpus.inputs import find_shards
from tasks.security.access import note_access
from tasks.security.audit import audit
from tasks.storage import open_store
from tasks.storage.store import find

if TYPE_CHECKING:
    from rich.console import Group

COLOURS = {"passed": "green", "warned": "dark_orange3", "failed": "red"}


def validate(
    dataset: Annotated[
        str, typer.Argument(help="NAME, dataset/NAME@VERSION, or a file or folder, which is published first.")
    ],
    config: Config = None,
    set_: Set = None,
    name: Annotated[
        str, typer.Option(help="For a file or folder: the name of the dataset; by default the file's or folder's own.")
    ] = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Validate a dataset: every document, and the corpus as a whole. The exit code is 3 when the gate is closed.

    Documents that break a rule of validation.quarantine are set aside; the others become a new version. A name that is both
    a dataset's and a file's means the dataset; write ./NAME for the file.
    """
    from tasks.config.flows import ValidateConfig

    payload = parameters_of("validate", config, dataset, set_)
    settings = ValidateConfig.model_validate(payload["config"])
    path, known = Path(dataset), False
    with suppress(Unknown, ValueError):
        _known(dataset)
        known = True
    if known or not path.exists():
        if name:
            raise ValueError(f"--name is for files and folders, and {dataset!r} is none")
        ref = dataset
    else:
        own = re.sub(r"[^a-z0-9._-]+", "-", path.resolve().name.lower().partition(".")[0]).strip("-._")
        fields, _ = make_version(name or own, [path], as_=as_)
        ref = str(fields["ref"])
    what = f"validate dataset {ref}"
    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)
        arguments = {"dataset": ref}
        run_and_tell("validate", settings, arguments, preflight=lambda: _known(ref), as_json=as_json, show=checks_table)


def _known(dataset: str) -> None:
    """Raises Unknown for a dataset that there is not, ValueError for what is no reference."""
    find(open_store(home()), *parse_ref(dataset, kind="dataset"))


def checks_table(fields: dict[str, Any]) -> Group:
    """The checks for people: outcome, measured, limit, count; below them what breaks them, and what came of the dataset."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tasks.report.data import number

    table = Table("check", "outcome", "measured", "limit", "count", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.overflow = "fold"
    lines: list[Text] = []
    for check in fields["checks"] or ():
        outcome, count = check["outcome"], check["count"]
        value = check["measured"]
        entries = (
            f"{value:.2%}" if "%" in check["limit"] and not isinstance(value, str) else number(value),
            check["limit"],
            "" if count is None else str(count),
        )
        table.add_row(check["name"], Text(outcome, COLOURS[outcome]), *entries)
        lines += [Text(f"  {check['name']}: {sample}", COLOURS[outcome]) for sample in check["samples"]]
    made = [Text(f"{key}: {short_ref(fields[key])}") for key in ("accepted", "quarantined") if fields[key]]
    return Group(table, *lines, *made)


MARKS = {"drift": "DRIFT", "none": "ok", "insufficient": "-"}


def drift(
    reference: Annotated[
        str, typer.Argument(help="The reference data: NAME, dataset/NAME@VERSION, or a file or folder.")
    ],
    new: Annotated[str, typer.Argument(help="The new data, named in the same way.")],
    tokenizer: Annotated[
        str, typer.Option(help="KIND/NAME[@VERSION] of a tokenizer, tokens or checkpoint, or a folder.  [words]")
    ] = "",
    text_field: Annotated[str, typer.Option(help="The field that contains the text.")] = "text",
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Test whether new data has drifted from a reference, in what, and how certain that is.

    Settings are in docs/configuration.md, such as `--set drift.false_alarm_rate=0.01`. A name that is both a dataset's and a
    file's means the dataset; write ./NAME for the file.
    """
    from tasks.config.files import changed
    from tasks.data.drift.comparison import Corpus, drift_of

    config = changed(RevalidationConfig, set_ or ()).drift
    corpora = []
    for name in (reference, new):  # a dataset of the store, or else files
        try:
            ref, folder = _fetched(name, kind="dataset")
        except (Unknown, ValueError):
            folder = Path(name)
            if not folder.exists():
                raise
            ref = str(folder)
        corpora.append(Corpus(ref, tuple(find_shards([folder]))))
    encoder = None
    if tokenizer:
        encoder = Path(tokenizer) if Path(tokenizer).exists() else _fetched(tokenizer, kind="")[1]
    with tempfile.TemporaryDirectory() as work:
        result = drift_of(
            corpora[0], corpora[1], config, Path(work), tokenizer=encoder, text_field=text_field, workers=cores()
        )
    say({"drift": result}, _drift_words(result), as_json=as_json)


def _fetched(name: str, *, kind: str) -> tuple[str, Path]:
    """An artifact of the store, every byte checked. Raises Unknown, ValueError."""
    store = open_store(home())
    manifest = find(store, *(parse_ref(name, kind=kind) if kind else parse_ref(name)))
    note_access(home(), manifest.ref, bytes=manifest.bytes, what="drift")
    return manifest.ref, store.fetch(manifest)


def _drift_words(result: dict[str, Any]) -> str:
    counts, rate = result["documents"], result["false_alarm_rate"]
    rows = [("column", "verdict", "value", "threshold", "p", "what moved")]
    for column in result["columns"]:
        figures = (short_number(column[key]) for key in ("value", "threshold", "p_value"))
        rows.append((column["name"], MARKS[column["verdict"]], *figures, ", ".join(column["moved"])))
    features = (result["classifier"] or {}).get("features", [])
    words = ", ".join(f"{each['feature']} {each['reference']:.1%} -> {each['new']:.1%}" for each in features[:8])
    return "\n".join(
        [
            f"{result['verdict']}: {result['why']}",
            f"{short_ref(result['reference'])}: {counts['reference']} documents, {counts['looked_at_reference']} looked at; "
            f"{short_ref(result['new'])}: {counts['new']} documents, {counts['looked_at_new']} looked at; "
            f"{result['splits']} splits, false-alarm rate {rate:g}",
            *aligned(rows),
            *([f"Words that tell them apart, by documents: {words}"] if result["verdict"] == "drift" and words else []),
        ]
    )
