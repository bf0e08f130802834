"""`headway dataset`: make dataset versions of files, and list them."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.output import say, short_ref
from deployments.cli.person import As, asked

app = typer.Typer(help="Make dataset versions of files, and list them.", no_args_is_help=True)


@app.command()
def publish(
    name: Annotated[str, typer.Argument(help="Name of the dataset: lower case, digits, dot, dash.")],
    paths: Annotated[list[Path], typer.Argument(help="JSONL and JSONL.gz files, text files, folders.")],
    include: Annotated[str, typer.Option(help="Files that count in folders, as a pattern: '*.py'.")] = "*",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Folders or files to leave out, as a pattern; may be given often.")
    ] = None,
    as_: As = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make a dataset version of files.

    JSON lines are kept byte for byte. Other text files become documents with fields `text` and `path`; what is not UTF-8 text is
    left out and counted. The same files are the same version.
    """
    from tasks.artifacts import parse_ref
    from tasks.formats.documents import pack
    from tasks.registry.audit import audit
    from tasks.settings import home
    from tasks.storage import open_store

    _, name, _ = parse_ref(name, kind="dataset")
    store = open_store(home())
    work = home() / "work"
    work.mkdir(parents=True, exist_ok=True)
    with asked("publish", as_, what=f"dataset/{name}"), tempfile.TemporaryDirectory(dir=work) as folder:
        packed = pack(paths, Path(folder) / "out", include=include, exclude=tuple(exclude or ()))
        manifest = store.publish(Path(folder) / "out", kind="dataset", inputs=(), provenance=_provenance(name, packed))
        audit(store, "publish dataset", right="publish", what=manifest.ref)
    fields = {
        "ref": manifest.ref,
        "documents": packed.documents,
        "bytes": manifest.bytes,
        "skipped": len(packed.skipped),
        "uri": store.uri_of(manifest),
    }
    say(fields, _published(fields, packed.skipped), as_json=as_json)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List all dataset versions, newest first."""
    from tasks.settings import home
    from tasks.storage import open_store

    store = open_store(home())
    rows: list[dict[str, Any]] = [
        {
            "ref": manifest.ref,
            "created": manifest.provenance.created,
            "documents": int(manifest.provenance.metrics.get("documents", 0)),
            "files": len(manifest.content.files),
            "bytes": manifest.bytes,
            "uri": store.uri_of(manifest),
        }
        for manifest in store.manifests("dataset")
    ]
    words = [f"{short_ref(r['ref'])}  {r['created']}  {r['bytes'] / 1e6:.1f} MB in {r['files']} file(s)" for r in rows]
    say({"datasets": rows}, "\n".join(words) or "No dataset yet: headway dataset publish NAME PATH...", as_json=as_json)


def _provenance(name: str, packed: Any) -> Any:
    from tasks.lifecycle import code_version
    from tasks.storage.manifest import Provenance

    commit, dirty = code_version()
    return Provenance(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        stage="publish",
        commit=commit,
        dirty=dirty,
        metrics={"documents": float(packed.documents), "skipped": float(len(packed.skipped))},
    )


def _published(fields: dict[str, Any], skipped: dict[str, str]) -> str:
    lines = [f"{fields['ref']}", f"{fields['documents']} documents, {fields['bytes'] / 1e6:.1f} MB"]
    if skipped:
        path, why = next(iter(skipped.items()))
        lines.append(f"{len(skipped)} file(s) left out, for example {path} ({why})")
    return "\n".join(lines)
