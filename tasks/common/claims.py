"""Claims of processes on several hosts to the same thing: who supervises a job, works on a flow run, or acts as the watch.

A store that several hosts share gives them out (tasks/storage/blob/claims.py). A store in a folder gives none: there one host
works, and locks of files suffice. Whoever holds a claim asks `require` before each step that another must not take at the same
time: no process knows by its own clock whether it still holds one, for it may have been stopped meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

WAIT_SECONDS = 2.0
"""Between two questions for a claim that another holds."""


def host_claim(platform: str, host: str) -> str:
    """Name of the claim that the watch of a host holds while it runs: who wants to know whether the host is there asks for it.

    `platform` tells the hosts that share a database from others that only share the store (tasks/config/database.py).
    """
    return f"hosts/{platform}/{host}"


def watch_claim(platform: str) -> str:
    """Name of the claim to act as the watch of all hosts of a platform."""
    return f"watch/{platform}"


def run_claim(flow_run: str) -> str:
    """Name of the claim that a flow run's process holds."""
    return f"runs/{flow_run}"


class Claim(Protocol):
    """A thing that is ours."""

    @property
    def lost(self) -> bool:
        """Whether it is known to be another's; nobody is asked."""
        ...

    @property
    def before(self) -> dict[str, Any]:
        """The note of the holder before us, if it ended without giving the claim back; else nothing."""
        ...

    def require(self) -> None:
        """Return when it is still ours, by the service's own word. Raises Superseded; Missing while it does not answer."""
        ...

    def give_back(self) -> None: ...


class Claims(Protocol):
    """What gives them out."""

    def take(self, name: str) -> Claim | None:
        """The claim to a name; None while another holds it. Raises Missing."""
        ...

    def held(self, name: str) -> bool:
        """Whether somebody holds it now. Raises Missing."""
        ...


class Unclaimed:
    """What stands for a claim where one host works alone."""

    lost = False

    @property
    def before(self) -> dict[str, Any]:
        return {}

    def require(self) -> None:
        """It is nobody else's."""

    def give_back(self) -> None:
        """Nothing was taken."""


ALONE = Unclaimed()


@contextmanager
def claimed(
    claims: Claims | None, name: str, *, waiting: Callable[[], None], sleep: Callable[[float], None]
) -> Iterator[Claim]:
    """Hold the claim to a name, or nothing where there are none; `waiting` is called while another holds it, and may raise."""
    if claims is None:
        yield ALONE
        return
    while (claim := claims.take(name)) is None:
        waiting()
        sleep(WAIT_SECONDS)
    try:
        yield claim
    finally:
        claim.give_back()
