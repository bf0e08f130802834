"""Signatures of artifacts: signing what leaves training, and the one door through which it is asked for ever after.

Beside a manifest lie the bundle over the files (tasks/signing/bundle.py) and the statement of what they are
(tasks/signing/statement.py). Whose key counts is trust.py. Bytes are not read here: a store compares every byte that it hands
out with the manifest, whose digests the bundle must name, no more and no fewer. So a checked file is a signed file, and the
same bytes are hashed once. See docs/trust.md.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.common.process import locked
from tasks.config.base import digest
from tasks.security.audit import audited
from tasks.security.trust import signer_of, trusted_key
from tasks.signing.bundle import SIGNATURE, sign_files
from tasks.signing.keys import Signer, key_id
from tasks.signing.statement import STATEMENT, Statement, claimed_statement, seal_statement
from tasks.storage.history import published_as
from tasks.storage.manifest import Manifest
from tasks.storage.signed import claims_of, digests_of, open_signed
from tasks.storage.store import Store

KINDS = ("checkpoint", "model")
"""What leaves training, and is signed."""


def sign(store: Store, home: Path, manifest: Manifest, *, reason: str = "") -> Statement:
    """Sign an artifact with the home's key, and see that the signature counts. The digests are the manifest's: no byte is read.

    Raises IntegrityError when the trust policy does not let this key sign this artifact, Missing without the key.
    """
    signer = require_signer(home, manifest.content.kind, manifest.provenance.name)
    bundle = sign_files(digests_of(manifest), signer)
    statement = Statement.model_validate(
        {
            **claims_of(manifest),
            "index": published_as(store, manifest.content.kind, manifest.provenance.name, manifest.version),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "key": key_id(signer.public_key()),
            "bundle": hashlib.sha256(bundle).hexdigest(),
        }
    )
    with (
        audited(store, "sign", what=manifest.ref, reason=reason, after=statement.key),
        locked(home / "locks" / "signing"),
    ):
        store.attach(manifest, SIGNATURE, bundle)
        store.attach(manifest, STATEMENT, seal_statement(statement, signer))
        return require_signed(store, home, manifest)


def require_signer(home: Path, kind: str, name: str) -> Signer:
    """The home's key, when it may sign an artifact of this kind and name: asked before the work whose result it is to sign.

    Raises IntegrityError when it may not, Missing when it is not there or its vault does not answer.
    """
    signer = signer_of(home)
    trusted_key(home, key_id(signer.public_key()), f"{kind}/{name}")
    return signer


def require_signed(store: Store, home: Path, manifest: Manifest) -> Statement:
    """What a trusted signer stated of this artifact.

    Raises IntegrityError unless it is of this one, and counts; Untrusted when it is the key that does not.
    """
    try:
        bundle, envelope = store.attachment(manifest, SIGNATURE), store.attachment(manifest, STATEMENT)
        if bundle is None:
            raise IntegrityError("it is not signed")
        if envelope is None:
            raise IntegrityError(
                "it is signed in the old form: over its files, but without a statement of what they are"
            )
        claimed = claimed_statement(envelope).key
        key = trusted_key(home, claimed, f"{manifest.content.kind}/{manifest.provenance.name}")
        statement = open_signed(manifest, bundle, envelope, key)
        # An older version must not be put forward as a newly published one. Whoever rolls back says so: the history then
        # has a rollback, and no publishing. A copy from another store is none either.
        index = published_as(store, manifest.content.kind, manifest.provenance.name, manifest.version)
        if statement.index < index:
            raise IntegrityError(
                f"its statement is of change {statement.index} of the name, and the history has it as published in change "
                f"{index}: an older signature under a newer publishing"
            )
        return statement
    except IntegrityError as error:
        raise type(error)(
            f"{manifest.ref}: {error.message}",
            problems=error.problems,
            remedy=error.remedy or remedy_for(manifest.ref),
        ) from error


def signed_config(home: Path, store: Store, model: Manifest) -> dict[str, Any]:
    """The configuration that a model was made with; empty when it is not the one whose digest was signed.

    Programs, variables and commands in it are not for running: those are this run's own. Raises IntegrityError when no signature
    counts.
    """
    require_signed(store, home, model)
    config = model.provenance.config or {}
    return config if digest(config) == model.provenance.config_digest else {}


def is_signed(store: Store, home: Path, manifest: Manifest) -> bool:
    """Return whether a trusted key signed an artifact as it is."""
    try:
        require_signed(store, home, manifest)
    except IntegrityError:
        return False
    return True


def remedy_for(ref: str) -> str:
    """What to do about a signature that does not count."""
    return (
        "Nothing was done with it. If you know from elsewhere that it is what it should be: "
        f"`headway sign {ref} --reason TEXT`; if not, make it again with `headway retrain`."
    )
