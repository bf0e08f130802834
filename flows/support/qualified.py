"""A qualification for people: its page beside the run in MLflow, the same in short in Prefect's page of the flow run.

Both for a qualification that was made now and for one that still holds. The page itself is tasks/report/qualification/report.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact
from tasks.orchestration.run import Lifecycle
from tasks.report.qualification.report import FILE, qualification_markdown
from tasks.storage.store import Store, find

STAGE = "benchmark"


def tell_qualification(run: Lifecycle) -> None:
    """Attach what the run's qualification says, where it has one."""
    outcome = run.outcomes.get(STAGE)
    folder = folder_of(run.store, outcome.outputs[-1]) if outcome and outcome.outputs else None
    if folder is None or not (folder / FILE).is_file():
        return
    if run.run:
        run.need_spool().log_file(run.run, folder / FILE)
    told = json.loads((folder / "qualification.json").read_text(encoding="utf-8"))
    what = f"{told['name']}: {told['verdict']['verdict']}"
    hand_in(new_artifact("markdown", "qualification", qualification_markdown(told), what))


def folder_of(store: Store, ref: str) -> Path | None:
    """The folder of a qualification, every byte checked; None where it is not there, or not intact."""
    try:
        return store.fetch(find(store, *parse_ref(ref)))
    except HeadwayError:
        return None
