"""`headway dataset`, `tokenizer`, `checkpoint`: make versions of files, to be trained on and started from; and list datasets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import in_home, say, short_ref
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.signing.bundle import sign_folder
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store
from tasks.storage.manifest import Provenance


def is_address(text: str) -> bool:
    """Whether somebody named the Hugging Face hub, and not a file."""
    return text.startswith("hf:/")


def publish_dataset(
    name: Annotated[str, typer.Argument(help="The name of the dataset: lower-case letters, digits, dot, dash.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="JSONL (also .gz and .zst), Parquet, text files, folders; or hf://datasets/ORG/NAME[@REVISION][/PATH].",
        ),
    ],
    include: Annotated[str, typer.Option(help="The files to take from folders, as a pattern: '*.py'.")] = "*",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Folders or files to leave out, as a pattern; may be repeated.")
    ] = None,
    text_field: Annotated[
        str,
        typer.Option(
            help="The field or column that contains the text; the first lines of each file are checked for it. Empty: no check."
        ),
    ] = "text",
    sign_key: Annotated[
        str, typer.Option(help="Sign every shard with this private key (PEM), or `home` for the key of this home.")
    ] = "",
    signature: Annotated[
        list[Path] | None, typer.Option(help="A signature that somebody else made over shards; may be repeated.")
    ] = None,
    license_: Annotated[
        str,
        typer.Option(
            "--license", help="The licence of the data, by its SPDX id: 'cc-by-4.0'. Otherwise as the hub has it."
        ),
    ] = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Publish files as a dataset version.

    JSON lines and Parquet are kept byte for byte; a file whose first lines are not JSON objects with text is refused. Other text
    files become documents with fields `text` and `path`; others than UTF-8 are left out and counted. The same files are the
    same version. The source, publisher and signer of each shard are recorded, and validation.admission can require them.

    An address hf://datasets/ORG/NAME@REVISION/PATH is of the Hugging Face hub: the revision is pinned to a commit, PATH may be a
    file, a folder or a pattern. HF_TOKEN is for private and gated ones, HF_ENDPOINT for a mirror.
    """
    fields, skipped = make_version(
        name,
        paths,
        include=include,
        exclude=exclude or (),
        text_field=text_field,
        sign_key=sign_key,
        signatures=signature or (),
        license_=license_,
        as_=as_,
    )
    lines = [f"{fields['ref']}", f"{fields['documents']} documents, {fields['bytes'] / 1e6:.1f} MB"]
    lines += [_origin_in_words(origin) for origin in fields["origins"]]
    if skipped:
        path, why = next(iter(skipped.items()))
        lines.append(f"{len(skipped)} file(s) left out, for example {path} ({why})")
    say(fields, "\n".join(lines), as_json=as_json)


def make_version(
    name: str,
    paths: Sequence[str | Path],
    *,
    include: str = "*",
    exclude: Sequence[str] = (),
    text_field: str = "",
    sign_key: str = "",
    signatures: Sequence[Path] = (),
    license_: str = "",
    as_: str = "",
) -> tuple[dict[str, Any], dict[str, str]]:
    """Publish files as a dataset version; returns the fields to print, and the files that were left out with the reason."""
    from deployments.publishing.datasets import from_hub, make_dataset

    _, name, _ = parse_ref(name, kind="dataset")
    store = open_store(home())
    addresses = [str(path) for path in paths if is_address(str(path))]
    local = [Path(path) for path in paths if not is_address(str(path))]
    how: dict[str, Any] = {"include": include, "exclude": exclude, "text_field": text_field, "license_": license_}
    how["bundles"] = lambda folder: _bundles(folder, sign_key, signatures)
    with asked("publish", as_, what=f"dataset/{name}"):
        if addresses:
            from deployments.publishing.hugging_face import Hub

            manifest, packed, kept = from_hub(store, home() / "work", name, addresses, Hub(), paths=local, **how)
        else:
            manifest, packed, kept = make_dataset(store, home() / "work", name, local, **how)
    fields = {
        "ref": manifest.ref,
        "documents": packed.documents,
        "bytes": manifest.bytes,
        "skipped": len(packed.skipped),
        "signatures": kept,
        "uri": store.uri_of(manifest),
        "origins": (manifest.provenance.config or {}).get("origins", []),
    }
    return fields, packed.skipped


def _origin_in_words(origin: Mapping[str, Any]) -> str:
    """A line of where something on the hub came from, and of its licence."""
    terms = f"licence {origin['license']}" if origin.get("license") else "its card names no licence"
    return f"from {origin['uri']} (revision {origin['revision']}), {terms}" + ("; gated" if origin["gated"] else "")


def list_datasets(as_json: Json = False) -> None:
    """List all dataset versions, newest first."""
    store = open_store(home())
    rows: list[dict[str, Any]] = []
    for manifest in store.manifests("dataset"):
        origin = ""  # where it came from, in a few words
        sources = (manifest.provenance.model_extra or {}).get("sources", {}).values()
        if manifest.provenance.stage == "validate":
            origin = f"what validation left of {short_ref(next(iter(manifest.provenance.inputs), 'a dataset'))}"
        elif first := sorted({source for of in sources for source in of}):
            origin = f"from {first[0]}" + (f" and {len(first) - 1} more" if len(first) > 1 else "")
        rows.append(
            {
                "ref": manifest.ref,
                "created": manifest.provenance.created,
                "documents": int(manifest.provenance.metrics.get("documents", 0)),
                "files": len(manifest.content.files),
                "bytes": manifest.bytes,
                "from": origin,
                "uri": store.uri_of(manifest),
            }
        )
    words = [
        f"{short_ref(r['ref'])}  {r['created'][:19]}  {r['bytes'] / 1e6:.1f} MB in {r['files']} file(s)  {r['from']}"
        for r in rows
    ]
    say(
        {"datasets": rows},
        words or in_home("No dataset yet", "Make one: headway dataset publish NAME PATH..."),
        as_json=as_json,
    )


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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def publish_tokenizer(
    name: Annotated[str, typer.Argument(help="The name of the tokenizer: lower-case letters, digits, dot, dash.")],
    folder: Annotated[Path, typer.Argument(help="A folder with a tokenizer.json, as save_pretrained writes it.")],
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Publish a folder as a tokenizer version, to be named by `preprocessing.tokenizer.ref`.

    Only the tokenizer's own files are published: no code, no weights.
    """
    from tasks.data.tokenizing.tokenizer import open_tokenizer
    from tasks.registry.versions import publish as publish_artifact

    _, name, _ = parse_ref(name, kind="tokenizer")
    opened = open_tokenizer(folder)
    eod = opened.require_eod()
    store, work = open_store(home()), home() / "work"
    work.mkdir(parents=True, exist_ok=True)
    with asked("publish", as_, what=f"tokenizer/{name}"), tempfile.TemporaryDirectory(dir=work) as temporary:
        taken = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
        for file in taken:
            shutil.copyfile(folder / file, Path(temporary) / file)
        provenance = Provenance(name=name, created=datetime.now(UTC).isoformat(timespec="seconds"), stage="publish")
        manifest = publish_artifact(store, Path(temporary), kind="tokenizer", inputs=(), provenance=provenance)
    fields = {"ref": manifest.ref, "vocab_size": opened.vocab_size, "eod_id": eod, "files": taken}
    say(fields, f"{manifest.ref}\n{opened.vocab_size} entries, end of document {eod}", as_json=as_json)


def publish_checkpoint(
    name: Annotated[str, typer.Argument(help="The name of the checkpoint: lower-case letters, digits, dot, dash.")],
    path: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder with safetensors weights, or a .gguf file; or hf://ORG/NAME[@REVISION][/FILE.gguf]."
        ),
    ],
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Publish a Hugging Face folder as a checkpoint version, to be named by `training.base`.

    Weights, settings, tokenizer, card and license are published; no code, no pickle. The tokenizer becomes a version of its own,
    and the checkpoint is signed with this home's key: you vouch for its origin. A .gguf file is converted to a folder first.

    An address hf://ORG/NAME@REVISION is of the Hugging Face hub: the revision is pinned to a commit. HF_TOKEN is for private and
    gated models, HF_ENDPOINT for a mirror.
    """
    from deployments.publishing.base_models import from_hub, make_base

    _, name, _ = parse_ref(name, kind="checkpoint")
    with asked("publish", as_, what=f"checkpoint/{name}"):
        if is_address(path):
            from deployments.publishing.hugging_face import Hub

            made = from_hub(open_store(home()), home(), name, path, Hub())
        else:
            made = make_base(open_store(home()), home(), name, Path(path))
    origins = (made.checkpoint.provenance.config or {}).get("origins", [])
    fields = {
        "ref": made.checkpoint.ref,
        "tokenizer": made.tokenizer.ref,
        "architecture": made.architecture,
        "parameters": made.parameters,
        "bytes": made.checkpoint.bytes,
        "files": [file.path for file in made.checkpoint.content.files],
        "key": made.key,
        "origins": origins,
    }
    words = f"{made.architecture}, {made.parameters / 1e6:,.1f} M parameters, signed by key {made.key[:16]}"
    lines = [made.checkpoint.ref, words, f"its tokenizer: {made.tokenizer.ref}", *map(_origin_in_words, origins)]
    say(fields, "\n".join(lines), as_json=as_json)
