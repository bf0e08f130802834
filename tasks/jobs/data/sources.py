"""The corpora of a run: its own tokens, or a mixture of several tokens artifacts in one order.

One corpus in its order is samples.py, the shares are order.py. Which artifacts a run is given: flows/support/inputs.py.
See docs/training.md, "Data".
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.mmididx import map_tokens
from tasks.jobs.data.cache import open_cached
from tasks.jobs.data.order import Draws
from tasks.jobs.data.samples import TRAIN, Mapped, Samples, Source, Stream, open_samples, tokens_identity, vocabulary

OWN = "tokens"
"""Input with the run's own tokens; another corpus of a mixture is `tokens-NAME` (tasks/train.py)."""
TOKENIZER = "tokenizer/tokenizer.json"


class Mixture:
    """Samples of several corpora, each in its own order, drawn by shares."""

    def __init__(self, corpora: Sequence[Samples], shares: Sequence[float]) -> None:
        self._corpora, self._draws = corpora, Draws(shares)
        self._length = corpora[0].length

    @property
    def count(self) -> int:
        """Samples of all corpora; a corpus whose share is above its part of them comes again before all were seen."""
        return sum(corpus.count for corpus in self._corpora)

    def batch(self, consumed: int, size: int) -> NDArray[np.int64]:
        """The `size` samples that follow the first `consumed` ones: shape [size, length + 1]."""
        corpus, places = self._draws.at(consumed, size)
        rows = np.empty((size, self._length + 1), np.int64)
        for number in np.unique(corpus).tolist():
            mine = corpus == number
            rows[mine] = self._corpora[number].at(places[mine])
        return rows

    def close(self, *, done: bool) -> None:
        for corpus in self._corpora:
            corpus.close(done=done)


def open_source(inputs: Mapping[str, Path], config: TrainingConfig, execution: ExecutionConfig) -> Source:
    """What the run trains on: its own tokens, or the mixture of them and others.

    Raises ValueError for a corpus that is missing, shorter than one sample, or of another tokenizer; IntegrityError for
    an index that does not fit its tokens.
    """
    folders = corpora(inputs, config)
    for folder in folders[1:]:
        require_same_tokenizer(folders[0], folder)
    opened = [open_samples(folder, config, _stream(folder, execution, of=len(folders))) for folder in folders]
    return Mixture(opened, list(shares_by_name(config).values())) if config.mixture else opened[0]


def _stream(folder: Path, execution: ExecutionConfig, *, of: int) -> Stream:
    if execution.cache_gib is None:
        return Mapped(map_tokens(folder / TRAIN))
    return open_cached(folder / TRAIN, room=int(execution.cache_gib * 2**30 / of), environment=os.environ)


def corpora(inputs: Mapping[str, Path], config: TrainingConfig) -> list[Path]:
    """The folders of tokens, in the order of the shares. Raises ValueError for one that the job was not given."""
    if not config.mixture:
        return [inputs[OWN]]
    others = {name: inputs.get(f"{OWN}-{name}") for name in shares_by_name(config)}
    own = [name for name, folder in others.items() if folder is None]
    if len(own) != 1:
        raise ValueError(
            f"training.mixture has shares for {', '.join(others)}; of these the job was not given {', '.join(own) or 'its own'} "
            "as another corpus: exactly one of them must be the run's own tokens"
        )
    return [folder or inputs[OWN] for folder in others.values()]


def shares_by_name(config: TrainingConfig) -> dict[str, float]:
    """Shares by the names of their corpora, sorted: the order in which they are written down changes nothing."""
    return dict(sorted((parse_ref(ref, kind="tokens")[1], share) for ref, share in config.mixture.items()))


def require_same_tokenizer(folder: Path, other: Path) -> None:
    """Raise ValueError unless the tokens of both folders are ids of the same vocabulary."""
    known = [(*vocabulary(each), _digest(each / TOKENIZER)) for each in (folder, other)]
    if known[0] == known[1]:
        return
    messages = [
        f"{each} ({size} entries, end of document {eod})"
        for each, (size, eod, _) in zip((folder, other), known, strict=True)
    ]
    raise ValueError(
        f"training.mixture mixes tokens of two tokenizers, {messages[0]} and {messages[1]}: preprocess one of them again with "
        "preprocessing.tokenizer.ref of the other"
    )


def _digest(path: Path) -> str:
    if not path.is_file():
        raise IntegrityError(f"{path} is missing: nobody can tell which tokenizer these tokens are of")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_identity(inputs: Mapping[str, Path], config: TrainingConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its data: that of its tokens, and of a mixture that of every corpus by its name."""
    if not config.mixture:
        return tokens_identity(inputs[OWN])
    folders = corpora(inputs, config)
    return {name: tokens_identity(folder) for name, folder in zip(shares_by_name(config), folders, strict=True)}
