"""One call of a stage: what is in its key, and what only stands around it. What is done with it is
tasks/orchestration/stage.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tasks.artifacts import Artifact, Cluster, Pending, plain
from tasks.config.base import Settings, digest


@dataclass(frozen=True)
class Call:
    """One call of a stage: what is in its key, and what only stands around it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        return digest(self.arguments)

    @property
    def handed(self) -> list[Artifact]:
        return [value for value in _single(self.args) if isinstance(value, Artifact)]

    @property
    def context(self) -> list[str]:
        return [ref for value in self.kwargs.values() if (ref := _context_ref(value))]

    @property
    def pending(self) -> bool:
        return self.without_key or any(isinstance(value, Pending) for value in _single(self.kwargs.values()))

    @property
    def without_key(self) -> bool:
        """What it is to work on is not made yet."""
        return is_pending(self.args)


def is_pending(args: Iterable[Any]) -> bool:
    return any(isinstance(value, Pending) for value in _single(args))


def _single(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments one by one, also those that come as a tuple."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def key_part(value: Any) -> Any:
    if isinstance(value, Artifact):
        return {"kind": value.KIND, "version": value.version}
    if isinstance(value, tuple):
        return [key_part(each) for each in value]
    assert isinstance(value, Settings | str | int | float | None), f"{type(value).__name__} has no place in a key"
    return plain(value)


def _context_ref(value: Any) -> str:
    if isinstance(value, Cluster):
        return value.qualification
    return value.ref if isinstance(value, Artifact) else ""
