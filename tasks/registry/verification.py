"""Every byte of an artifact against its manifest, a model's files against its signature, token files against their format."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.errors import IntegrityError
from tasks.signing import SIGNATURE, ensure_key, public_key_of, verify_folder
from tasks.storage.manifest import Manifest, Problem
from tasks.storage.store import Store, find
from tasks.tokenizing.checking import look


def problems_of(store: Store, ref: str, *, keys: Path) -> tuple[Manifest, list[Problem]]:
    """The manifest that a reference means, and everything that is wrong with what it names."""
    manifest = find(store, *parse_ref(ref))
    problems = store.verify(manifest)
    if manifest.content.kind == "model" and not problems:
        problems = _signature_problems(store, manifest, keys)
    if manifest.content.kind == "tokens" and not problems:
        problems = _format_problems(store.fetch(manifest))
    return manifest, problems


def _signature_problems(store: Store, manifest: Manifest, keys: Path) -> list[Problem]:
    signature = store.attachment(manifest, SIGNATURE)
    if signature is None:
        return [Problem(path=SIGNATURE, problem="signature", expected="a signature", actual="none")]
    try:
        verify_folder(store.fetch(manifest), signature, public_key_of(ensure_key(keys)))
    except IntegrityError as error:
        return [Problem(path=SIGNATURE, problem="signature", expected="valid", actual=error.message)]
    return []


def _format_problems(folder: Path) -> list[Problem]:
    """Whether every dataset is one that Megatron reads: index, sizes, ids below the vocabulary, ends of documents."""
    about = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    problems = []
    for split in about["splits"]:
        name = f"{split}_text_document"
        try:
            held = look(folder / name, largest=about["vocab_size"])
        except IntegrityError as error:
            problems.append(Problem(path=name, problem="format", expected="a Megatron dataset", actual=error.message))
            continue
        if held.sequences and held.ends != ((about["eod_id"], held.sequences),):
            ends = f"end of document {about['eod_id']} after {held.sequences} sequences"
            problems.append(Problem(path=f"{name}.bin", problem="format", expected=ends, actual=str(held.ends)))
    return problems
