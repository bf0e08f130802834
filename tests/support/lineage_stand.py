"""A small lineage in a home, published and signed as stages do it: a dataset, its tokens, a checkpoint, a champion."""

from pathlib import Path

from tasks.registry.refs import move_ref
from tasks.registry.versions import publish
from tasks.security.signatures import sign
from tasks.storage import open_store
from tasks.storage.manifest import Manifest, Provenance


def publish_one(home: Path, kind: str, name: str, text: str, *made_from: Manifest) -> Manifest:
    """One artifact of two files."""
    folder = home.parent / f"made-{kind}"
    (folder / "more").mkdir(parents=True, exist_ok=True)
    (folder / "data.bin").write_text(text * 100)
    (folder / "more" / "about.json").write_text(f'{{"of": "{text}"}}')
    (folder / ".gitignore").write_text("*.bin\n")
    made = Provenance(name=name, inputs=tuple(one.ref for one in made_from), stage="test", commit="c0ffee")
    inputs = tuple(one.version for one in made_from)
    return publish(open_store(home), folder, kind=kind, inputs=inputs, provenance=made)


def publish_lineage(home: Path, text: str = "first") -> dict[str, Manifest]:
    """By kind."""
    made: dict[str, Manifest] = {}
    for kind, before in (
        ("dataset", ()),
        ("tokens", ("dataset",)),
        ("checkpoint", ("tokens",)),
        ("model", ("checkpoint",)),
    ):
        made[kind] = publish_one(home, kind, "tiny", f"{kind} {text}", *(made[one] for one in before))
        if kind in ("checkpoint", "model"):
            sign(open_store(home), home, made[kind])
    move_ref(
        open_store(home), "tiny/champion", made["model"].ref, inputs=made["model"].provenance.inputs, reason="best"
    )
    return made
