"""The errors that a caller decides on, each with its exit code and a remedy.

A user's mistake is a plain `ValueError` that names the value and the remedy; it leaves with exit code 2.
What is not listed here and is not a `ValueError` is a bug of ours. See docs/DESIGN.md, "Output for machines".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class HeadwayError(Exception):
    """An error with a remedy. `exit_code` is what the command line leaves with."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class GateFailed(HeadwayError):
    """A gate stayed closed. `checks` are the failed ones: name, measured value, limit."""

    exit_code = 3

    def __init__(self, message: str, *, stage: str, checks: list[dict[str, Any]], remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.stage = stage
        self.checks = checks


class JobFailed(HeadwayError):
    """A job ended without a result. `failure` is its class, as tasks/compute/job.py names them."""

    exit_code = 4

    def __init__(self, message: str, *, failure: str, folder: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.failure = failure
        self.folder = folder


class IntegrityError(HeadwayError):
    """Bytes are not what their manifest or signature says. `problems` names each file."""

    exit_code = 5

    def __init__(self, message: str, *, problems: list[dict[str, Any]] | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.problems = problems or []


class Unknown(HeadwayError):
    """A name that nothing is known under: a dataset, an artifact, an endpoint."""

    exit_code = 2


class Refused(HeadwayError):
    """The policy does not let this person do this, or does not believe that it is this person."""

    exit_code = 2


class Conflict(HeadwayError):
    """Somebody else changed the same thing at the same time, and was first."""

    exit_code = 2


class Missing(HeadwayError):
    """Something that the work needs is not there: a server, a package, an account, room on the disk."""

    exit_code = 6


class Superseded(Missing):
    """Another process, on whatever host, has the flow run or the job by now: this one does nothing more to it."""


class Cancelled(HeadwayError):
    """Somebody stopped the run: Ctrl-C, SIGTERM, or cancel in the Prefect UI."""

    exit_code = 130


class Suspended(BaseException):
    """The run waits for an answer, and its process ends until then. It is no error: finished stages are reused when it continues.

    `suspend` reports it to Prefect. It is called when everything else of the run is closed: from then on somebody may answer,
    and another process may continue the run.
    """

    def __init__(self, suspend: Callable[[], NoReturn]) -> None:
        super().__init__("the run waits for an answer")
        self.suspend = suspend
