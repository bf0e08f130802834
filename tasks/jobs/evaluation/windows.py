"""Windows of documents that are longer than the model takes, and batches of them. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Positions [start, end) of one document; only those from `scored_from` on are scored, the others are context."""

    document: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def windows(lengths: Sequence[int], sequence_length: int) -> list[Window]:
    """Cover every position of every document once: whole where it fits, else windows that overlap by half.

    A later window is moved back to full length, so what it scores has at least half a window of context.
    """
    stride = max(1, sequence_length // 2)
    found = []
    for document, length in enumerate(lengths):
        end = min(sequence_length, length)
        found.append(Window(document, start=0, end=end, scored_from=0))
        while end < length:
            scored_from, end = end, min(end + stride, length)
            found.append(Window(document, start=end - sequence_length, end=end, scored_from=scored_from))
    return found


def batches(found: Sequence[Window], positions: int) -> Iterator[list[Window]]:
    """Windows of similar length, longest first; padded to its longest, a batch of several takes at most `positions`."""
    batch: list[Window] = []
    for window in sorted(found, key=lambda window: -window.length):
        if batch and (len(batch) + 1) * batch[0].length > positions:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
