"""Files become a dataset version: packed, published, with where each shard came from and whose signatures are beside it.

The core of `headway dataset publish` and of the bridge. Who may, is asked by them; packing is tasks/data/corpus/packing.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.config.base import digest
from tasks.data.admission import covers
from tasks.data.corpus.packing import Packed, pack, to_lines
from tasks.orchestration.run import code_version
from tasks.registry.versions import publish
from tasks.security.audit import actor
from tasks.signing.bundle import SIGNATURES
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.store import Store

if TYPE_CHECKING:
    from deployments.publishing.hugging_face import Hub

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
    ours: Collection[Path] = (),
    origins: Sequence[Mapping[str, Any]] = (),
    license_: str = "",
) -> Made:
    """Publish files as a version of a dataset; `work` is where the copy is made that is published.

    With a `text_field`, the first lines of each file must have text in it (tasks/data/corpus/packing.py). `origin` says where a
    path came from, where that is another place. `check` is asked when all is read, and before anything is published: it raises
    when the files are not what they were. `ours` are roots that this process made. `origins` says of repositories on
    a hub what the provenance keeps; `license_` is the licence, where somebody knows it better. Raises ValueError when there is
    nothing to publish.
    """
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "out"
        packed = pack(list(paths), out, include=include, exclude=tuple(exclude), text_field=text_field, ours=ours)
        check()
        sources = {shard: sorted({origin(source) for source in of}) for shard, of in packed.sources.items()}
        packed = packed._replace(sources=sources)
        signed = bundles(out)
        manifest = publish(
            store, out, kind="dataset", inputs=(), provenance=_provenance(name, packed, origins, license_)
        )
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


def from_hub(
    store: Store,
    work: Path,
    name: str,
    addresses: Sequence[str],
    hub: Hub,
    *,
    include: str = "*",
    exclude: Sequence[str] = (),
    paths: Sequence[Path] = (),
    **how: Any,
) -> Made:
    """Publish files of repositories on the Hugging Face hub, and of `paths`, as a version of a dataset.

    Every address is resolved to a commit, and its files are chosen, before the first one is downloaded. A `.json` file becomes
    JSON lines. `how` is as in `make_dataset`. Raises as `Hub.open`, `data_files` and `make_dataset` do.
    """
    from deployments.publishing.hub_files import data_files

    opened = [hub.open(address, "dataset") for address in addresses]
    chosen = [data_files(source) for source in opened]
    with ExitStack() as stack:
        roots = {
            stack.enter_context(hub.fetched(source, files, work)): source
            for source, files in zip(opened, chosen, strict=True)
        }
        uris = {f"{root.resolve()}/": f"{source.uri()}/" for root, source in roots.items()}
        for (root, source), files in zip(roots.items(), chosen, strict=True):
            for file in files:
                path = root.resolve() / file.path
                uris[str(to_lines(path) if path.suffix.lower() == ".json" else path)] = source.uri(file.path)

        return make_dataset(
            store,
            work,
            name,
            [*paths, *roots],
            include=include,
            exclude=exclude,
            ours=roots,
            origin=lambda path: uris.get(path, path),
            origins=[source.origin() for source in opened],
            **how,
        )


def _provenance(name: str, packed: Packed, origins: Sequence[Mapping[str, Any]], license_: str) -> Provenance:
    commit, dirty = code_version()
    config = {**({"origins": list(origins)} if origins else {}), **({"license": license_} if license_ else {})} or None
    return Provenance(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        stage="publish",
        sources=packed.sources,
        published_by=actor().name,
        commit=commit,
        dirty=dirty,
        config=config,
        config_digest=digest(config) if config else None,
        metrics={"documents": float(packed.documents), "skipped": float(len(packed.skipped))},
    )
