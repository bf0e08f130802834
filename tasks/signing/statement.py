"""What a signer says of an artifact: which one it is, what it was made from, when. An in-toto statement in a DSSE envelope.

The bundle signs bytes; the statement says whose bytes these are, so that a good signature cannot be shown under
another name. Whether it is true of an artifact is asked in tasks/security/trust.py. https://github.com/in-toto/attestation.

A DSSE envelope is a payload and one signature over it: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md

An OpenSSF model-signing bundle: names and digests of all files of a folder, signed. The library makes what is said in it.

Stricter than the library's own verifier: no ignore list (it passes over `.git` by default), no links, no second name of a
file's bytes, no bundle that leaves any of that open. Bytes are compared with digests elsewhere: a store does so whenever it hands
files out, so a bundle that names the same digests as the manifest needs no second reading (tasks/security/trust.py). The
library is imported on use: it is slow. See https://github.com/sigstore/model-transparency.
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
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tasks.signing.keys import pem_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SIGNATURE = "signature.json"
"""Name under which a bundle is kept beside the artifact that it signs."""
SIGNATURES = "signatures.json"
"""The same for a dataset, whose shards may be signed by several people: a JSON list of bundles."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def sign_folder(folder: Path, signer: Signer) -> bytes:
    """The bundle over every file of a folder, each read once; raises IntegrityError when the folder holds links."""
    from model_signing import hashing

    # Refuse what a signer and a loader could read differently: links, hard links, devices.
    if folder.is_symlink() or not folder.is_dir():
        raise IntegrityError(f"{folder} is no plain folder, and is not signed")
    results = [(path.relative_to(folder).as_posix(), _link_problem(path)) for path in _entries(folder)]
    problems = [{"path": name, "problem": "link", "said": text} for name, text in results if text]
    if problems:
        text = "; ".join(f"{problem['path']}: {problem['said']}" for problem in problems)
        raise IntegrityError(
            f"{folder} is not signed: {text}", problems=problems, remedy="Put plain files in their place."
        )
    everything = hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)
    return _bundle(everything.hash(folder), signer)


def sign_files(files: Mapping[str, str], signer: Signer) -> bytes:
    """The bundle over files whose sha256 (hex, by path) are known: what was hashed when it was published is not read again."""
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest

    rules = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    items = [
        manifest.FileManifestItem(path=PurePosixPath(path), digest=Digest("sha256", bytes.fromhex(sha256)))
        for path, sha256 in files.items()
    ]
    return _bundle(manifest.Manifest("files", items, manifest.SerializationType.from_args(rules)), signer)


def signed_files(bundle: bytes, key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    """The files that the owner of a key signed: sha256 by path, whether or not they are there.

    Raises IntegrityError when this is no bundle, or was not made by this key.
    """
    files = claimed_files(bundle)
    unseal(json.loads(bundle)["dsseEnvelope"], key)
    return files


def claimed_files(bundle: bytes) -> dict[str, str]:
    """Digests that a bundle names, by file; not authenticated. A bundle that lets files go unchecked is refused."""
    try:
        predicate = json.loads(claimed_payload(json.loads(bundle)["dsseEnvelope"]))["predicate"]
        rules, resources = predicate["serialization"], predicate["resources"]
        lax = rules.get("ignore_paths") or rules["allow_symlinks"] or rules["method"] != "files"
        names = {str(entry["name"]): str(entry["digest"]) for entry in resources}
        twice, other = len(names) != len(resources), [e for e in resources if e["algorithm"] != "sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, IntegrityError) as error:
        raise IntegrityError(
            f"the signature is no model-signing bundle: {error!r}", remedy="Sign the model again."
        ) from error
    if lax or twice or other:
        raise IntegrityError(
            f"the signature leaves files unchecked: it was made with {rules}, or names a file twice or by another hash",
            remedy="Sign the model with `headway`, without an ignore list.",
        )
    return names


def _bundle(manifest: Any, signer: Signer) -> bytes:
    """The payload is the library's; the form around it is Sigstore's: https://docs.sigstore.dev/about/bundle/."""
    from google.protobuf import json_format  # type: ignore[import-untyped]
    from model_signing._signing.signing import Payload

    output = json_format.MessageToJson(Payload(manifest).statement.pb).encode()
    hint = hashlib.sha256(pem_of(signer.public_key())).hexdigest()  # as the library names keys
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": seal(output, signer, keyid=""),
    }
    return json.dumps(bundle).encode()


def _link_problem(path: Path) -> str:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if stat.S_ISDIR(status.st_mode):
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "it is no plain file"
    return f"it is a hard link: its bytes have {status.st_nlink} names" if status.st_nlink != 1 else ""


def _entries(folder: Path) -> Iterator[Path]:
    """Every file and folder below a folder, hidden ones too; links are named, never followed."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in sorted(folders + files))


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
        plain = canonical_json(sealed).encode() == envelope and _same_base64(sealed)
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


def _same_base64(sealed: Any) -> bool:
    texts = [sealed["payload"], *(signature["sig"] for signature in sealed["signatures"])]
    return all(base64.b64encode(base64.b64decode(text, validate=True)).decode() == text for text in texts)
