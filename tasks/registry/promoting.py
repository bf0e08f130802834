"""Promoting: a model version becomes the champion because somebody says so, when it is sound and a signature on it counts.

The order is look, verify, audit, move. Verifying takes as long as reading every byte: who promotes another one meanwhile
wins, and this promotion is told. The way back is rollback.py; what endpoints serve does not live here. See docs/history.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from tasks.artifacts import parse_ref
from tasks.common.errors import Conflict, IntegrityError
from tasks.registry.refs import move_ref, place_of, read_ref, target_of
from tasks.registry.verification import problems_of, refusal
from tasks.storage.manifest import Manifest
from tasks.storage.store import Document, Store, find


class Promotion(NamedTuple):
    """Who is champion now, and who was."""

    model: Manifest
    before: str | None

    @property
    def changed(self) -> bool:
        return self.before != self.model.ref


def would_promote(store: Store, ref: str) -> Promotion:
    """What promoting a reference would do. Raises Unknown, and ValueError for what is no model."""
    kind, name, version = parse_ref(ref, kind="" if "/" in ref else "model")
    if kind != "model":
        raise ValueError(f"{ref} is no model: only models have a champion; `headway models` lists them")
    model = find(store, kind, name, version)
    return Promotion(model, read_ref(store, f"{name}/champion"))


def promote(
    store: Store,
    ref: str,
    *,
    keys: Path,
    reason: str,
    crowned: Callable[[Manifest], None] = lambda manifest: None,
) -> Promotion:
    """Make a model version the champion. `crowned` is called when it is: MLflow is to be told, again after a kill before that.

    Raises IntegrityError for one that is damaged, unsigned, or signed by a key that is not trusted or revoked; Conflict when
    another one was promoted since this began.
    """
    model = would_promote(store, ref).model
    name = f"{model.provenance.name}/champion"
    start = place_of(store, name)
    _, problems = problems_of(store, model.ref, keys=keys)
    if problems:
        why = refusal(model, problems)
        raise IntegrityError(f"it is not promoted: {why.message}", problems=why.problems, remedy=why.remedy)
    before = move_ref(store, name, model.ref, inputs=model.provenance.inputs, reason=reason, start=start)
    crowned(model)
    return Promotion(model, before)


def compared_with(
    store: Store, ref: str, *, seen: Document | Literal["now"] | None
) -> Document | Literal["now"] | None:
    """Where `move_ref` must find the champion's ref to make a model the champion that was compared with the one at `seen`.

    Raises Conflict when another model became the champion meanwhile: this one has not proven itself against that.
    """
    name = f"{parse_ref(ref)[1]}/champion"
    now, champion = place_of(store, name), read_ref(store, name)
    if seen == "now" or champion == ref:
        return "now"
    if (now and now.etag) != (seen and seen.etag) and champion != target_of(seen):
        raise Conflict(
            f"{champion} became the champion after {ref} was compared, and stays",
            remedy="The same command again compares with the new champion, and reuses the rest.",
        )
    return now
