"""Ray's Jobs API: the SDK's client with bounded waits and the house's errors. What a job is on Ray lives in backend.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.common.errors import JobFailed, Missing

try:
    from ray.job_submission import JobSubmissionClient
except ModuleNotFoundError as absent:
    raise Missing("backend ray needs the package ray", remedy="pip install -c constraints.txt -e '.[ray]'") from absent

ANSWER_SECONDS = (5.0, 30.0)
"""Longest wait for a connection, and then for the answer; the SDK by itself waits for ever."""


class RayJobs(JobSubmissionClient):  # type: ignore[misc]
    """The Jobs API of one cluster, by the address of its dashboard. OSError: it does not answer. RuntimeError: it refuses."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(address, headers={"Authorization": f"Bearer {token}"} if token else None)

    def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": ANSWER_SECONDS, **more})


def unreachable(address: str, error: Exception) -> Missing:
    """For a cluster that must answer, and does not."""
    said = str(error).splitlines()[0]
    return Missing(
        f"the Ray cluster at {address} does not answer: {said}",
        remedy="Start it, or set ray.address to the address of its dashboard (`ray status` on its head tells whether it runs).",
    )


def refused(error: Exception, folder: Path) -> JobFailed:
    """For a cluster that answers, and does not do it."""
    return JobFailed(f"Ray refused the job: {error}", failure="infrastructure", folder=str(folder))
