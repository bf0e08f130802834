"""The other corpora of a run that trains on a mixture: the tokens artifacts that `training.mixture` names beside its own.

How samples are drawn of them is tasks/jobs/data_sources.py, which also refuses tokens of another tokenizer.
See docs/training.md, "Data".
"""

from __future__ import annotations

from typing import Any

from tasks.artifacts import Checkpoint, Tokens, parse_ref
from tasks.storage.store import Store, find
from tasks.training_config import TrainingConfig


def others(dataset: str, config: TrainingConfig) -> dict[str, str]:
    """References of the other corpora by their names. Raises ValueError when two have one name, or the run's own is not there."""
    if not config.mixture:
        return {}
    _, own, _ = parse_ref(dataset, kind="dataset")
    names = [parse_ref(ref, kind="tokens")[1] for ref in config.mixture]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"training.mixture names tokens/{name} twice: give one share to one version of it")
    if own not in names:
        raise ValueError(f"training.mixture has no share for the run's own tokens: add {own}, the name of its dataset")
    return {name: ref for name, ref in zip(names, config.mixture, strict=True) if name != own}


def mixed_in(store: Store, dataset: str, config: TrainingConfig) -> tuple[Tokens, ...]:
    """The other corpora, in the order of the shares. Raises Unknown for one that there is not."""
    found = (find(store, *parse_ref(ref, kind="tokens")) for ref in others(dataset, config).values())
    return tuple(Tokens(name=m.provenance.name, version=m.version, uri=store.uri_of(m)) for m in found)


def beside(base: tuple[Checkpoint, ...], mixed: tuple[Tokens, ...]) -> tuple[Any, ...]:
    """What train is handed after its tokens and settings: only what there is, so that the key of a run without is what it was."""
    return (*(base or (None,)), mixed) if mixed else base
