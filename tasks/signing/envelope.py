"""A DSSE envelope: a payload and one signature over it. https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md

What the payload says is bundle.py and statement.py.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from tasks.common.errors import IntegrityError
from tasks.signing.keys import Signer, require_signature

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
