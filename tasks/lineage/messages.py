"""What people read in MLflow: names, descriptions in Markdown, and which numbers stand on a flow's own run. Pure.

How it gets there is spool.py and publish.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tasks.common import process
from tasks.config.base import digest
from tasks.config.database import mlflow_uri
from tasks.lineage.database import SCHEME

# Where a run can be looked at in MLflow's page: the local server's, or that of the server that the environment named.
#
# No mlflow here; what runs are called there is read from what the publisher noted down.


TRAINING = "workflowType=machine_learning"
"""Has MLflow's page show what belongs to training; otherwise it starts with what belongs to applications of language models."""


def run_page(home: Path, spool: Path, run: str) -> str | None:
    """Address of a run's page; None while MLflow does not know it, or no server shows it.

    `spool` is the folder of the run's spool, `run` its identity there.
    """
    payload = process.read_json(spool / "published.json") or {}
    known = payload.get("runs", {}).get(run)
    base = _server(home, payload.get("tracking_uri", ""))
    return f"{base}/#/experiments/{known['experiment']}/runs/{known['id']}?{TRAINING}" if known and base else None


def _server(home: Path, tracking_uri: str) -> str | None:
    if tracking_uri.startswith(("http://", "https://")):
        parts = urlsplit(tracking_uri)
        without_login = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return without_login.rstrip("/")
    if tracking_uri not in (f"{SCHEME}{home / 'mlflow' / 'mlflow.db'}", mlflow_uri(home)):
        return None
    folder = home / "platform" / "mlflow"
    server = process.read_json(folder / "server.json")
    runs = server and process.alive(process.read_json(folder / "handle.json"))
    return str(server["url"]) if runs else None


RUN_PAGE = "headway:run"
"""Stands for the address of the described run's page, which is known only when it is published."""
MODEL_FLOWS_NOTE = """All that happened to the model **{subject}**. A run is a flow run of Headway's; its stages are nested in it.

- The curves of a training are on the run `train`; the numbers to compare runs by are on the flow's own run.
- The datasets that a run read are in the column *Dataset*; the model that it made is among the registered models, as `{subject}`.
- Search for `tags."headway.status" = 'gate_closed'`, `tags."headway.dataset" LIKE 'dataset/NAME@%'`,
  `tags."headway.commit" = '...'`, `tags."headway.prefect_flow_run" = '...'`.
"""
MODEL_NOTE = """Versions that were exported. Alias `champion`: promoted, the one to beat; `previous`: the champion before,
to go back to; `challenger`: exported last, and not promoted.

A version's files are in Headway's store, under the reference in its tag `headway.ref`: `headway verify REF` checks them,
`headway lineage REF` shows what they were made from.
"""
BACK = (
    "`headway rollback model/NAME --reason TEXT` makes the version before the champion again. To serve it, run its dataset with "
    "its configuration and commit: recorded stages are reused, so only the deployment runs again. "
    "`headway lineage` names all three."
)
CLUSTER_NOTE = (
    """Qualifications of the cluster **{subject}** by themselves: health, collectives, rates, storage, training."""
)
DATASET_NOTE = (
    """Verdicts on versions of the dataset **{subject}** by themselves: its checks, its quarantine, its drift."""
)
TAGS = {
    "Model": "ref",
    "Bits per byte": "bits_per_byte",
    "Dataset": "dataset",
    "Code": "commit",
    "Configuration": "config_digest",
}


def experiment_name(flow: str, subject: str) -> str:
    """One experiment for all that happens to a model; a cluster's qualifications and a dataset's verdicts have their own."""
    return {"qualify": f"cluster-{subject}", "validate": f"dataset-{subject}"}.get(flow, subject)


def experiment_note(flow: str, subject: str) -> str:
    notes = {"qualify": CLUSTER_NOTE, "validate": DATASET_NOTE}
    return notes.get(flow, MODEL_FLOWS_NOTE).format(subject=subject)


def run_name(flow: str, began: float) -> str:
    """`retrain 2026-11-21 15:04`, on this machine's clock."""
    return f"{flow} {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"


def headlines(outcomes: Iterable[Any], seconds: float) -> list[tuple[str, float, int]]:
    """The numbers by which runs are compared, of the stages' outcomes."""
    results = [
        (name, outcome.metrics[name], 0)
        for outcome in outcomes
        for name in outcome.shown.headlines
        if name in outcome.metrics
    ]
    return [*results, ("seconds", seconds, 0)]


def run_note(
    flow_run: Mapping[str, str] | None, status: str, *, why: str = "", report: str = "", facts: Mapping[str, str]
) -> str:
    """Description of a flow's run. What people click is in the first line: MLflow's page folds and covers the rest."""
    links = [f"[Flow run in Prefect]({flow_run['url']})"] if flow_run else []
    links += [f"[Report]({RUN_PAGE}/artifacts/{report}?{TRAINING})"] if report else []
    first = " · ".join([f"**{status.replace('_', ' ')}**", *links])
    return "\n\n".join(part for part in (first, why, _listed(facts)) if part)


def why(error: BaseException | None, stage: str) -> str:
    """Why a run ended as it did, and what to do."""
    if error is None:
        return ""
    where = f"in {stage}: " if stage else ""
    return f"{where}{error}\n\n{getattr(error, 'remedy', '')}".strip()


def surroundings_tags(surroundings: Mapping[str, str]) -> dict[str, str]:
    """Where a run ran and with what, as tags that people search by."""
    return {f"headway.{name}": value for name, value in surroundings.items()}


def as_input(payload: Mapping[str, Any]) -> dict[str, Any]:
    """An artifact that a run read, as one of MLflow's datasets; the Blob versions of its files in short."""
    source = {"uri": payload["uri"], "ref": payload["ref"]}
    if payload["blob_versions"]:
        source["blob_versions"] = _counted(payload["blob_versions"])
    profile = {"files": payload["files"], "bytes": payload["bytes"]}
    named = {key: payload[key] for key in ("name", "digest", "uri", "ref", "kind")}
    return {**named, "source": source, "profile": profile}


def output_tags(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a run made: reference, place, and the Blob versions in short; the file lineage.json of the run has them whole."""
    tags = {}
    for number, each in enumerate(entries):
        tags[f"headway.output.{number}"] = each["ref"]
        tags[f"headway.output.{number}.uri"] = each["uri"]
        if each["blob_versions"]:
            tags[f"headway.output.{number}.blob_versions"] = _counted(each["blob_versions"])
    return tags


def _counted(versions: Mapping[str, str]) -> str:
    """A hundred thousand files have as many Blob versions: how many, and a digest to compare two lists by."""
    return f"{len(versions)} files, sha256 {digest(dict(versions))}"


RESULTS_TABLE = "eval_results_table.json"
"""The name that `mlflow.evaluate` gives the table of its results, by which MLflow's page and API find it."""
RESULTS_TAG = {"mlflow.loggedArtifacts": json.dumps([{"path": RESULTS_TABLE, "type": "table"}])}
MOST_ROWS = 10_000
"""Of a table: MLflow's page takes all of it into the browser."""


def results_table(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """A table by columns, of one length, in the form in which MLflow keeps tables; the first MOST_ROWS rows."""
    return {
        "columns": list(columns),
        "data": [list(row) for row in islice(zip(*columns.values(), strict=True), MOST_ROWS)],
    }


def version_tags(facts: Mapping[str, str]) -> dict[str, str]:
    """The same facts as tags that people search by."""
    return {f"headway.{TAGS[key]}": value for key, value in facts.items() if value}


def version_note(facts: Mapping[str, str], before: str) -> str:
    """Description of a version of a model: what it is, and how to go back to the one before."""
    note = _listed(facts)
    if not before:
        return f"{note}\n\nThe first of its name."
    return f"{note}\n\nBefore it: `{_short(before)}`, alias `previous`. {BACK}"


def _listed(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: `{_short(value)}`" for name, value in facts.items() if value)


def _short(value: str) -> str:
    """Twelve digits of a version are enough for every command, and for people."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b", r"\1", value)
