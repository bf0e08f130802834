"""What a signature must say of an artifact, and the check of one against a key. Pure: bytes and a manifest in, a statement out.

No home and no store is needed, so the model that MLflow hands out asks the same (tasks/jobs/serving/mlflow_model.py). Whose key
counts, and whether an older signature was put under a newer publishing, is tasks/security/signatures.py.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tasks.common.errors import IntegrityError
from tasks.config.base import digest
from tasks.signing.bundle import signed_files
from tasks.signing.statement import Statement, open_statement
from tasks.storage.manifest import FileEntry, Manifest, Provenance

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

LINEAGE = {"inputs", "context", "stage", "commit", "dirty", "config_digest"}
"""The fields of the provenance whose digest is signed."""


def open_signed(manifest: Manifest, bundle: bytes, envelope: bytes, key: ec.EllipticCurvePublicKey) -> Statement:
    """What the owner of a key stated of exactly this artifact and its files.

    Raises IntegrityError when another key signed, or something else was signed than the manifest says.
    """
    statement = open_statement(envelope, key)
    claims = claims_of(manifest)
    stated = statement.model_dump(include=set(claims))
    wrong = [
        f"{name} {_short(stated[name])}, and not {_short(claims[name])}"
        for name in claims
        if stated[name] != claims[name]
    ]
    if wrong:
        raise IntegrityError(f"its statement was made for something else: {'; '.join(wrong)}")
    if hashlib.sha256(bundle).hexdigest() != statement.bundle:
        raise IntegrityError("the bundle beside it is not the one that the statement is about")
    if signed_files(bundle, key) != digests_of(manifest):
        raise IntegrityError("other files were signed than its manifest names")
    return statement


def claims_of(manifest: Manifest) -> dict[str, str | None]:
    """What a statement must say of an artifact."""
    weights = (ref for ref in manifest.provenance.inputs if ref.startswith(("checkpoint/", "model/")))
    return {
        "kind": manifest.content.kind,
        "name": manifest.provenance.name,
        "version": manifest.version,
        "base": next((ref.rpartition("@")[2] for ref in weights), None),
        "lineage": lineage_digest(manifest.provenance),
    }


def lineage_digest(provenance: Provenance) -> str:
    """Digest of what an artifact was made from and how; not of where it lies, so that a copy keeps its signature."""
    return digest(provenance.model_dump(mode="json", include=LINEAGE))


def digests_of(manifest: Manifest) -> dict[str, str]:
    """sha256 of each file, by path."""
    return {file.path: file.sha256 for file in manifest.content.files}


def served_files(manifest: Manifest) -> list[FileEntry]:
    """What answering needs: the files at the root. Variants and what they hold are for endpoints."""
    return [entry for entry in manifest.content.files if "/" not in entry.path]


def _short(claim: str | None) -> str:
    return (claim or "none")[:16]
