"""What a flow asks Prefect about its own run: who it is, and whether somebody cancelled it. The same for all flows."""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as runtime
from prefect.settings import PREFECT_UI_URL

ASK_EVERY_SECONDS = 3.0
_last_asked = 0.0


def flow_run() -> dict[str, str]:
    """Id and page of the running flow run."""
    identity = str(runtime.get_id())
    base = PREFECT_UI_URL.value() or ""
    return {"id": identity, "url": f"{base}/runs/flow-run/{identity}"}


def cancelled() -> bool:
    """Whether the flow run is being cancelled, asked of the server every three seconds at most."""
    global _last_asked
    if time.monotonic() - _last_asked < ASK_EVERY_SECONDS or runtime.get_id() is None:
        return False
    _last_asked = time.monotonic()
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(runtime.get_id()).state
    return bool(state and (state.is_cancelling() or state.is_cancelled()))
