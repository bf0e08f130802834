"""`headway validate`: a dataset, or plain files, judged by themselves; what breaks a rule is set aside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.data.dataset import make_version
from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set, parameters_of
from deployments.cli.output import short_ref
from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.security.audit import audit
from tasks.storage import open_store
from tasks.storage.store import find

if TYPE_CHECKING:
    from rich.console import Group

COLOURS = {"passed": "green", "warned": "yellow", "failed": "red"}


def validate(
    dataset: Annotated[
        str, typer.Argument(help="NAME, dataset/NAME@VERSION, or a file or folder: that is published first.")
    ],
    config: Config = None,
    set_: Set = None,
    name: Annotated[str, typer.Option(help="Of a file or folder: the dataset's name; without it, its own.")] = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Judge a dataset: every document and the whole. Exit code 3 when the gate is closed.

    Documents that break a rule of validation.quarantine are set aside, and what is left is a version of its own. A name that is
    a dataset's and a file's means the dataset; write ./NAME for the file.
    """
    from tasks.config.flows import ValidateConfig

    payload = parameters_of("validate", config, dataset, set_)
    settings = ValidateConfig.model_validate(payload["config"])
    ref = _published(dataset, name, as_)
    what = f"validate dataset {ref}"
    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)
        arguments = {"dataset": ref}
        run_and_tell("validate", settings, arguments, preflight=lambda: _known(ref), as_json=as_json, show=_table)


def _published(dataset: str, name: str, as_: str) -> str:
    """The reference of a dataset; files become one. Raises ValueError for a name that files cannot have."""
    path = Path(dataset)
    if _is_known(dataset) or not path.exists():
        if name:
            raise ValueError(f"--name is for files and folders, and {dataset!r} is none")
        return dataset
    own = re.sub(r"[^a-z0-9._-]+", "-", path.resolve().name.lower().partition(".")[0]).strip("-._")
    fields, _ = make_version(name or own, [path], as_=as_)
    return str(fields["ref"])


def _is_known(dataset: str) -> bool:
    try:
        _known(dataset)
    except (Unknown, ValueError):
        return False
    return True


def _known(dataset: str) -> None:
    """Raises Unknown for a dataset that there is not, ValueError for what is no reference."""
    find(open_store(home()), *parse_ref(dataset, kind="dataset"))


def _table(fields: dict[str, Any]) -> Group:
    """The checks for people: outcome, measured, limit, count; below them what breaks them, and what came of the dataset."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "outcome", "measured", "limit", "count", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    lines: list[Text] = []
    for check in fields["checks"] or ():
        outcome, count = check["outcome"], check["count"]
        entries = (_measured(check), check["limit"], "" if count is None else str(count))
        table.add_row(check["name"], Text(outcome, COLOURS[outcome]), *entries)
        lines += [Text(f"  {check['name']}: {sample}", COLOURS[outcome]) for sample in check["samples"]]
    made = [Text(f"{key}: {short_ref(fields[key])}") for key in ("accepted", "quarantined") if fields[key]]
    return Group(table, *lines, *made)


def _measured(check: dict[str, Any]) -> str:
    from tasks.report.data import number

    value = check["measured"]
    return f"{value:.2%}" if "%" in check["limit"] and not isinstance(value, str) else number(value)
