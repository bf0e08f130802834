"""`headway dataset`: make dataset versions of files, and list them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import say, short_ref
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.signing.bundle import sign_folder
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store


def publish(
    name: Annotated[str, typer.Argument(help="Name of the dataset: lower case, digits, dot, dash.")],
    paths: Annotated[list[Path], typer.Argument(help="JSONL (also .gz and .zst), Parquet, text files, folders.")],
    include: Annotated[str, typer.Option(help="Files that count in folders, as a pattern: '*.py'.")] = "*",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Folders or files to leave out, as a pattern; may be given often.")
    ] = None,
    sign_key: Annotated[
        str, typer.Option(help="Sign every shard: a private key (PEM), or `home` for the key of this home.")
    ] = "",
    signature: Annotated[
        list[Path] | None, typer.Option(help="A signature that somebody else made over shards; may be given often.")
    ] = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make a dataset version of files.

    JSON lines and Parquet are kept byte for byte. Other text files become documents with fields `text` and `path`; what is not
    UTF-8 text is left out and counted. The same files are the same version. Where each shard came from, who published it and
    who signed it is kept: validation.admission may ask for it.
    """
    fields, skipped = make_version(
        name, paths, include=include, exclude=exclude or (), sign_key=sign_key, signatures=signature or (), as_=as_
    )
    say(fields, _published(fields, skipped), as_json=as_json)


def make_version(
    name: str,
    paths: list[Path],
    *,
    include: str = "*",
    exclude: Sequence[str] = (),
    sign_key: str = "",
    signatures: Sequence[Path] = (),
    as_: str = "",
) -> tuple[dict[str, Any], dict[str, str]]:
    """Publish files as a dataset version; what is told of it, and the files that were left out with the reason."""
    from deployments.publishing.datasets import make_dataset

    _, name, _ = parse_ref(name, kind="dataset")
    store = open_store(home())
    with asked("publish", as_, what=f"dataset/{name}"):
        manifest, packed, kept = make_dataset(
            store,
            home() / "work",
            name,
            paths,
            include=include,
            exclude=exclude,
            bundles=lambda folder: _bundles(folder, sign_key, signatures),
        )
    fields = {
        "ref": manifest.ref,
        "documents": packed.documents,
        "bytes": manifest.bytes,
        "skipped": len(packed.skipped),
        "signatures": kept,
        "uri": store.uri_of(manifest),
    }
    return fields, packed.skipped


def list_(as_json: Json = False) -> None:
    """List all dataset versions, newest first."""
    store = open_store(home())
    rows: list[dict[str, Any]] = [
        {
            "ref": manifest.ref,
            "created": manifest.provenance.created,
            "documents": int(manifest.provenance.metrics.get("documents", 0)),
            "files": len(manifest.content.files),
            "bytes": manifest.bytes,
            "from": _origin(manifest),
            "uri": store.uri_of(manifest),
        }
        for manifest in store.manifests("dataset")
    ]
    words = [
        f"{short_ref(r['ref'])}  {r['created'][:19]}  {r['bytes'] / 1e6:.1f} MB in {r['files']} file(s)  {r['from']}"
        for r in rows
    ]
    say({"datasets": rows}, words or "No dataset yet: headway dataset publish NAME PATH...", as_json=as_json)


def _bundles(folder: Path, sign_key: str, signatures: Sequence[Path]) -> list[bytes]:
    """Our own signature over the folder, and those that were handed in. Raises ValueError for a file that is not there."""
    for path in (*signatures, *([Path(sign_key)] if sign_key not in ("", "home") else [])):
        if not path.is_file():
            raise ValueError(f"{path} does not exist; name a file")
    results = [path.read_bytes() for path in signatures]
    if sign_key:
        key = ensure_key(home() / "keys") if sign_key == "home" else Path(sign_key)
        results.append(sign_folder(folder, LocalKey(key)))
    return results


def _origin(manifest: Any) -> str:
    """Where a version came from, in a few words."""
    if manifest.provenance.stage == "validate":
        return f"what validation left of {short_ref(next(iter(manifest.provenance.inputs), 'a dataset'))}"
    sources = sorted(
        {source for of in (manifest.provenance.model_extra or {}).get("sources", {}).values() for source in of}
    )
    return f"from {sources[0]}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "") if sources else ""


def _published(fields: dict[str, Any], skipped: dict[str, str]) -> str:
    lines = [f"{fields['ref']}", f"{fields['documents']} documents, {fields['bytes'] / 1e6:.1f} MB"]
    if skipped:
        path, why = next(iter(skipped.items()))
        lines.append(f"{len(skipped)} file(s) left out, for example {path} ({why})")
    return "\n".join(lines)
