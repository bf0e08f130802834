"""Files become a dataset version: packed, published, with where each shard came from and whose signatures are beside it.

The core of `headway dataset publish` and of the bridge. Who may, is asked by them; packing is tasks/data/corpus/packing.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tasks.data.admission import covers
from tasks.data.corpus.packing import Packed, pack
from tasks.orchestration.run import code_version
from tasks.registry.versions import publish
from tasks.security.audit import actor
from tasks.signing.bundle import SIGNATURES
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.store import Store

Bundles = Callable[[Path], list[bytes]]
"""Signatures over the shards in a folder."""


class Made(NamedTuple):
    """A dataset version, what was packed into it, and the number of signatures beside it."""

    manifest: Manifest
    packed: Packed
    signatures: int


def make_dataset(
    store: Store,
    work: Path,
    name: str,
    paths: Sequence[Path],
    *,
    include: str = "*",
    exclude: Sequence[str] = (),
    text_field: str = "",
    bundles: Bundles = lambda folder: [],
    origin: Callable[[str], str] = lambda source: source,
    check: Callable[[], None] = lambda: None,
) -> Made:
    """Publish files as a version of a dataset; `work` is where the copy is made that is published.

    With a `text_field`, the first lines of each file must have text in it (tasks/data/corpus/packing.py). `origin` says where a
    path came from, where that is another place. `check` is asked when all is read, and before anything is published: it raises
    when the files are not what they were. Raises ValueError when there is nothing to publish.
    """
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "out"
        packed = pack(list(paths), out, include=include, exclude=tuple(exclude), text_field=text_field)
        check()
        sources = {shard: sorted({origin(source) for source in of}) for shard, of in packed.sources.items()}
        packed = packed._replace(sources=sources)
        signed = bundles(out)
        manifest = publish(store, out, kind="dataset", inputs=(), provenance=_provenance(name, packed))
        return Made(manifest, packed, keep_signatures(store, manifest, signed))


def keep_signatures(store: Store, manifest: Manifest, bundles: list[bytes]) -> int:
    """Put signatures beside a dataset, and those that earlier versions have for the same shards; how many there are now.

    What they are worth is decided when somebody asks for a signer: tasks/data/admission.py.
    """
    results = [bundle.decode() for bundle in bundles]
    for version in store.manifests("dataset", manifest.provenance.name):
        results += json.loads(store.attachment(version, SIGNATURES) or b"[]")
    digests = {entry.sha256 for entry in manifest.content.files}
    kept = [bundle for bundle in dict.fromkeys(results) if covers(bundle, digests)]
    if kept:
        store.attach(manifest, SIGNATURES, json.dumps(kept).encode())
    return len(kept)


def _provenance(name: str, packed: Packed) -> Provenance:
    commit, dirty = code_version()
    return Provenance(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        stage="publish",
        sources=packed.sources,
        published_by=actor().name,
        commit=commit,
        dirty=dirty,
        metrics={"documents": float(packed.documents), "skipped": float(len(packed.skipped))},
    )
