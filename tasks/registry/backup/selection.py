"""Which artifacts a backup holds: all that cannot be made again from the others, and what serves or is about to.

Tokens are left out: they are made again from their dataset and tokenizer, and have the same version then. Of checkpoints it holds
the newest one of each name that is intact, and those that a champion stands on, now or before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.registry.backup.contents import KIND
from tasks.registry.transfer import ancestry
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find

MADE_AGAIN = ("tokens",)
SOME = "checkpoint"


def selected(store: Store, is_held: Callable[[Manifest], bool]) -> tuple[list[Manifest], list[Manifest]]:
    """What goes into a backup and what does not, both in the order of the store.

    `is_held` says whether the backup has the bytes of an artifact already: then it was intact, and is not read again.
    """
    everything = [one for one in store.manifests() if one.content.kind != KIND]
    wanted = _checkpoints(store, [one for one in everything if one.content.kind == SOME], is_held)
    chosen: list[Manifest] = []
    left: list[Manifest] = []
    for one in everything:
        key_asset = one.ref in wanted if one.content.kind == SOME else one.content.kind not in MADE_AGAIN
        (chosen if key_asset else left).append(one)
    return chosen, left


def _checkpoints(store: Store, found: list[Manifest], is_held: Callable[[Manifest], bool]) -> set[str]:
    wanted = {ref for champion in _champions(store) for ref in _checkpoints_under(store, champion)}
    for name in {one.provenance.name for one in found}:
        of_name = (one for one in found if one.provenance.name == name)
        newest = next((one for one in of_name if is_held(one) or not store.verify(one)), None)
        wanted |= {newest.ref} if newest else set()
    return wanted


def _champions(store: Store) -> Iterator[Manifest]:
    """What refs point to, and pointed to before."""
    for key in store.list("refs"):
        document = store.read(key)
        said = json.loads(document.data) if document else {}
        for ref in (said.get("target"), said.get("before")):
            try:
                yield from (find(store, *parse_ref(ref)),) if ref else ()
            except Unknown:
                continue


def _checkpoints_under(store: Store, manifest: Manifest) -> list[str]:
    return [one.ref for one in (manifest, *ancestry(store, manifest)) if one.content.kind == SOME]
