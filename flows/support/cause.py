"""Why a flow run was started: the batch of events that it covers (tasks/events/ledger.py). A batch has one run."""

from __future__ import annotations

from prefect.runtime import flow_run as runtime

from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.events.ledger import Ledger
from tasks.storage import open_store
from tasks.storage.store import find


def covered_elsewhere(cause: str) -> str:
    """Take the batch of events that asked for this run; the id of the flow run that has it, when that is another one.

    Empty without a cause, and when this run has the batch: also after it was resumed. Raises Unknown for no such batch.
    """
    if not cause:
        return ""
    mine = str(runtime.get_id())
    holder = Ledger(home()).claim(cause, mine)
    if holder is None:
        raise Unknown(f"no events asked for a run as {cause!r}", remedy="Leave `cause` empty: the bridge fills it in.")
    return "" if holder == mine else holder


def require_dataset(cause: str, dataset: str) -> None:
    """Raise Unknown for events about a dataset that is not there: before our run begins, for it is no failure of the model's."""
    if cause:
        find(open_store(home()), *parse_ref(dataset, kind="dataset"))
