"""Versions of artifacts for tests of history, rollback and retention: published and backdated."""

import json

from tasks.registry.versions import publish
from tasks.storage.manifest import Provenance


def make(store, folder, ref, files, *, inputs=(), context=(), **said):
    """Publish a version of KIND/NAME of texts by path; `inputs` and `context` are manifests."""
    kind, _, name = ref.partition("/")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    provenance = Provenance(
        name=name, inputs=tuple(m.ref for m in inputs), context=tuple(m.ref for m in context), **said
    )
    return publish(store, folder, kind=kind, inputs=tuple(m.version for m in inputs), provenance=provenance)


def make_many(store, folder, ref, count):
    """So many versions of a name, oldest first."""
    return [make(store, folder / f"{number}", ref, {"data": f"{number} of {ref}"}) for number in range(1, count + 1)]


def backdate(store, seconds):
    """Have everything that the histories tell be so much older."""
    for key in store.list("history"):
        document = store.read(key)
        change = json.loads(document.data)
        data = json.dumps({**change, "time": change["time"] - seconds}).encode()
        assert store.replace(key, data, etag=document.etag)


def forget_history(store):
    """Leave a local store as a Headway left it that kept no history."""
    for path in (store.root / "documents" / "history").rglob("*.json"):
        path.unlink()
