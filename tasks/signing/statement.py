"""What a signer says of an artifact: which one it is, what it was made from, when. An in-toto statement in a DSSE envelope.

The bundle (bundle.py) signs bytes; the statement says whose bytes these are, so that a good signature cannot be shown under
another name. Whether it is true of an artifact is asked in tasks/security/signatures.py. https://github.com/in-toto/attestation.

A DSSE envelope is a payload and one signature over it: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.common.errors import IntegrityError
from tasks.config.base import canonical_json
from tasks.signing.keys import Signer, key_id, require_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


PAYLOAD_TYPE = "application/vnd.in-toto+json"


def seal(payload: bytes, signer: Signer, *, keyid: str) -> dict[str, Any]:
    """The envelope over a payload."""
    signature = {"sig": _encoded(signer.sign(_to_sign(payload))), "keyid": keyid}
    return {"payload": _encoded(payload), "payloadType": PAYLOAD_TYPE, "signatures": [signature]}


def unseal(envelope: Any, key: ec.EllipticCurvePublicKey) -> bytes:
    """The payload, when the owner of the key signed it. Raises IntegrityError, also for a form that `seal` does not make."""
    payload = claimed_payload(envelope)
    try:
        (signature,) = envelope["signatures"]
        summary = base64.b64decode(signature["sig"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the envelope has not exactly one signature: {error!r}") from error
    require_signature(key, summary, _to_sign(payload))
    return payload


def claimed_payload(envelope: Any) -> bytes:
    """What an envelope says, not authenticated. Raises IntegrityError."""
    try:
        payload, kind = base64.b64decode(envelope["payload"], validate=True), envelope["payloadType"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise IntegrityError(f"this is no signed envelope (DSSE): {error!r}") from error
    if kind != PAYLOAD_TYPE:
        raise IntegrityError(f"the envelope holds {kind!r}, and not {PAYLOAD_TYPE}")
    return payload


def _to_sign(payload: bytes) -> bytes:
    """Pre-authentication encoding (PAE) of DSSE 1.0."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


STATEMENT = "statement.json"
"""Name under which a statement is kept beside the artifact that it is about."""
TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:headway:signature:1"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Statement(BaseModel):
    """What is signed beside the bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str
    name: str
    version: Digest
    base: Digest | None
    """Version of the weights that these were made from: a checkpoint, or a base model; None for training from nothing."""
    lineage: Digest
    """Digest of inputs, context, stage, code and configuration, as the manifest's provenance names them."""
    index: Annotated[int, Field(ge=0)]
    """Number of the change in the name's history that published this version: it only grows."""
    time: str
    """UTC, ISO 8601, by the signer's own clock: nothing is decided by it."""
    key: Digest
    """Who signs; see keys.key_id."""
    bundle: Digest
    """sha256 of the bundle over the files."""


def seal_statement(statement: Statement, signer: Signer) -> bytes:
    """The envelope of a statement, in its one spelling."""
    assert statement.key == key_id(signer.public_key()), "a statement names the key that signs it"
    predicate = statement.model_dump(mode="json", exclude={"kind", "name", "version"})
    output = {
        "_type": TYPE,
        "subject": [{"name": f"{statement.kind}/{statement.name}", "digest": {"sha256": statement.version}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    return canonical_json(seal(canonical_json(output).encode(), signer, keyid=statement.key)).encode()


def claimed_statement(envelope: bytes) -> Statement:
    """What an envelope says, not authenticated: whose key to ask for. Raises IntegrityError."""
    try:
        sealed = json.loads(envelope)
        output = json.loads(claimed_payload(sealed))
        (subject,) = output["subject"]
        kind, _, name = subject["name"].partition("/")
        statement = Statement.model_validate(
            {**output["predicate"], "kind": kind, "name": name, "version": subject["digest"]["sha256"]}
        )
        # One spelling only: a byte that no signature covers (a space, a key id, base64's idle bits) has no room to differ.
        texts = [sealed["payload"], *(signature["sig"] for signature in sealed["signatures"])]
        plain = canonical_json(sealed).encode() == envelope and all(
            base64.b64encode(base64.b64decode(text, validate=True)).decode() == text for text in texts
        )
        entries = (output["_type"], output["predicateType"], [signature["keyid"] for signature in sealed["signatures"]])
    except (ValueError, KeyError, TypeError, AttributeError, IntegrityError) as error:
        raise IntegrityError(f"this is no statement of a signer: {error!r}") from error
    if not plain or entries != (TYPE, PREDICATE_TYPE, [statement.key]):
        raise IntegrityError("the statement is not written as Headway writes it")
    return statement


def open_statement(envelope: bytes, key: ec.EllipticCurvePublicKey) -> Statement:
    """What the owner of a key stated. Raises IntegrityError when it is no statement, or was not made by this key."""
    statement = claimed_statement(envelope)
    if statement.key != key_id(key):
        raise IntegrityError(f"the statement names the key {statement.key[:16]}, and not {key_id(key)[:16]}")
    unseal(json.loads(envelope), key)
    return statement
