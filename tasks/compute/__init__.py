"""Where jobs run: job.py is the job as data, supervisor.py runs one to its end, and each backend has a file."""

from __future__ import annotations

from tasks.compute.job import Backend


def open_backend(name: str) -> Backend:
    """The backend of a name in the configuration."""
    from tasks.compute.local import LocalBackend

    return {"local": LocalBackend}[name]()
