"""The other corpora of a run that trains on a mixture: the tokens artifacts that `training.mixture` names beside its own.

How samples are drawn of them is tasks/jobs/data/sources.py, which also refuses tokens of another tokenizer; near duplicates
across the split are tasks/jobs/data/crossing.py's. See docs/training.md, "Data".
"""

from __future__ import annotations

from typing import Any

from tasks.artifacts import Checkpoint, Tokens, parse_ref
from tasks.config.training import TrainingConfig
from tasks.orchestration.run import pinned
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store


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


def mixed_in(store: Store, dataset: str, config: TrainingConfig, *, heldout_fraction: float) -> tuple[Tokens, ...]:
    """The other corpora, in the order of the shares; `heldout_fraction` is that of the run's own tokens.

    Raises Unknown for one that there is not, ValueError for one that holds out another fraction of its documents.
    """
    found = [pinned(store, ref, kind="tokens") for ref in others(dataset, config).values()]
    for manifest in found:
        _require_same_split(manifest, dataset, heldout_fraction)
    return tuple(Tokens(name=m.provenance.name, version=m.version, uri=store.uri_of(m)) for m in found)


def _require_same_split(manifest: Manifest, dataset: str, fraction: float) -> None:
    """Of a document that two corpora have, the fraction decides where it is: with two, one trains on what the other holds out.

    Tokens of whose fraction nothing is known pass.
    """
    preprocessing = (manifest.provenance.config or {}).get("preprocessing") or {}
    theirs = preprocessing.get("heldout_fraction", fraction)
    if theirs == fraction:
        return
    name, (_, own, _) = manifest.provenance.name, parse_ref(dataset, kind="dataset")
    raise ValueError(
        f"training.mixture mixes dataset/{own}, which holds out {fraction:g} of its documents, with dataset/{name}, which holds "
        f"out {theirs:g}: a document of both may be trained on in one and measured in the other. Set "
        f"preprocessing.heldout_fraction = {theirs:g}, or preprocess {name} again with {fraction:g}"
    )


def beside(base: tuple[Checkpoint, ...], mixed: tuple[Tokens, ...]) -> tuple[Any, ...]:
    """What train is handed after its tokens and settings: only what there is, so that the key of a run without is what it was."""
    return (*(base or (None,)), mixed) if mixed else base
