"""Several requests at once, in bounded memory: results come in the order of what they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")
WORKERS = 16
"""Requests at once for what is small."""


def in_order(work: Callable[[A], R], items: Iterable[A], *, workers: int, ahead: int) -> Iterator[R]:
    """Results one by one; at most `ahead` and one more are under way or wait to be taken. The first error ends it."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def in_parallel(work: Callable[[A], R], items: Iterable[A]) -> list[R]:
    """The results of many small requests."""
    return list(in_order(work, items, workers=WORKERS, ahead=4 * WORKERS))
