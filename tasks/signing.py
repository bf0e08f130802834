"""Trust in a model's files: an OpenSSF model-signing bundle over every byte of a folder, by a local P-256 key.

Stricter than the library's own verifier: no ignore list (it passes over `.git` by default), no links, no second name
of a file's bytes. A signature proves origin, not freshness. Where signatures are kept (beside an artifact, never inside
it) does not live here. The library is imported on use: it is slow. See https://github.com/sigstore/model-transparency.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.errors import IntegrityError, Missing

KEY_NAME = "signing.pem"
SIGNATURE = "signature.json"
"""Name under which a bundle is kept beside the artifact that it signs."""
SIGNATURES = "signatures.json"
"""The same for a dataset, whose shards may be signed by several people: a JSON list of bundles."""


def ensure_key(folder: Path) -> Path:
    """The private key of a folder (0600, in a folder 0700), made on first use with its public key beside it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    key = folder / KEY_NAME
    if not key.exists():
        _make_key(key)
    if key.stat().st_mode & 0o077:
        raise ValueError(
            f"the signing key {key} can be read by others: run `chmod 600 {key}`, or delete it for a new one"
        )
    if not public_key_of(key).exists():
        _write_public(key)
    return key


def public_key_of(key: Path) -> Path:
    """Where the public half of a private key lies."""
    return key.with_suffix(".pub")


def sign_folder(folder: Path, key: Path) -> bytes:
    """The signature bundle over every file of a folder; raises IntegrityError when the folder holds links."""
    from model_signing import signing

    _require_plain(folder)
    config = signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(_everything())
    with tempfile.TemporaryDirectory() as temporary:
        bundle = Path(temporary) / "model.sig"
        config.sign(folder, bundle)
        return bundle.read_bytes()


def verify_folder(folder: Path, signature: bytes, public_key: Path) -> None:
    """Raise IntegrityError naming every file that is not exactly what the owner of `public_key` signed."""
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    if not public_key.exists():
        raise Missing(
            f"the public key {public_key} is not there", remedy="Name the key that the model was signed with."
        )
    _require_plain(folder)
    signed = claimed_files(signature)
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key).set_hashing_config(_everything())
    try:
        with tempfile.TemporaryDirectory() as temporary:
            bundle = Path(temporary) / "model.sig"
            bundle.write_bytes(signature)
            config.verify(folder, bundle)
    except InvalidSignature as error:
        raise _refused(folder, [_problem("", "signature", "it was not made over this content by this key")]) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problems = _differences(folder, signed)
        if not str(error).startswith("Signature mismatch"):
            problems.append(_problem("", "signature", str(error)))
        raise _refused(folder, problems) from error


def signed_files(signature: bytes, public_key: Path) -> dict[str, str]:
    """The files that the owner of `public_key` signed: sha256 by name, whether or not they are there.

    Raises IntegrityError when the signature is no bundle or was not made by this key, Missing without the key. DSSE 1.0:
    https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not public_key.is_file():
        raise Missing(f"the public key {public_key} is not there", remedy="Name a file that holds a public key (PEM).")
    names = claimed_files(signature)
    try:
        key = serialization.load_pem_public_key(public_key.read_bytes())
    except ValueError as error:
        raise ValueError(f"{public_key} holds no public key: {error}; name a PEM file") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{public_key} is no elliptic curve key; name the public half of a P-256 key")
    envelope = json.loads(signature)["dsseEnvelope"]
    kind, payload = str(envelope["payloadType"]), base64.b64decode(envelope["payload"])
    said = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    try:
        key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), said, ec.ECDSA(_digest_of(key.curve.key_size)))
    except (InvalidSignature, LookupError, ValueError) as error:
        raise IntegrityError(f"the signature was not made by the key {public_key}") from error
    return names


def _digest_of(key_size: int) -> Any:
    """The digest that model-signing takes for a curve."""
    from cryptography.hazmat.primitives import hashes

    return {384: hashes.SHA384(), 521: hashes.SHA512()}.get(key_size, hashes.SHA256())


def _make_key(key: Path) -> None:
    """Create-only, so that two processes that start together end with one key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor, temporary = tempfile.mkstemp(dir=key.parent, prefix=".key.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
    try:
        os.link(temporary, key)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)


def _write_public(key: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(key.read_bytes(), None)
    pem = private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    descriptor, temporary = tempfile.mkstemp(dir=key.parent, prefix=".public.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
    os.replace(temporary, public_key_of(key))


def _everything() -> Any:
    """The library's hashing without any ignored path; git's files count like all others."""
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)


def _require_plain(folder: Path) -> None:
    """Refuse what a verifier and a loader could read differently: links, hard links, devices."""
    if folder.is_symlink() or not folder.is_dir():
        raise _refused(folder, [_problem(".", "missing", "it is no plain folder")])
    found = [(_relative(folder, path), _link_problem(path)) for path in _entries(folder)]
    problems = [_problem(name, "link", said) for name, said in found if said]
    if problems:
        raise _refused(folder, problems)


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


def claimed_files(signature: bytes) -> dict[str, str]:
    """Digests that the bundle names, by file; not authenticated. A bundle that lets files go unchecked is refused."""
    try:
        payload = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
        rules = payload["predicate"]["serialization"]
        lax = rules.get("ignore_paths") or rules["allow_symlinks"] or rules["method"] != "files"
        names = {str(entry["name"]): str(entry["digest"]) for entry in payload["predicate"]["resources"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"the signature is no model-signing bundle: {error!r}", remedy="Sign the model again."
        ) from error
    if lax:
        raise IntegrityError(
            f"the signature leaves files unchecked: it was made with {rules}",
            problems=[_problem("", "signature", "it ignores paths, follows links or covers shards")],
            remedy="Sign the model with `headway`, without an ignore list.",
        )
    return names


def _differences(folder: Path, signed: dict[str, str]) -> list[dict[str, Any]]:
    """What to tell a person after the library refused; the decision is the library's."""
    found = {_relative(folder, path): path for path in _entries(folder) if path.is_file()}
    problems = [
        _problem(name, "missing", "it was signed and is not there") for name in sorted(signed.keys() - found.keys())
    ]
    problems += [_problem(name, "extra", "nobody signed it") for name in sorted(found.keys() - signed.keys())]
    changed = (name for name in sorted(found.keys() & signed.keys()) if _sha256(found[name]) != signed[name])
    return problems + [_problem(name, "sha256", "its content is not what was signed") for name in changed]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _relative(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _problem(path: str, problem: str, said: str) -> dict[str, Any]:
    return {"path": path, "problem": problem, "said": said}


def _refused(folder: Path, problems: list[dict[str, Any]]) -> IntegrityError:
    said = "; ".join(f"{problem['path'] or 'the signature'}: {problem['said']}" for problem in problems)
    return IntegrityError(
        f"{folder} is not what was signed: {said}",
        problems=problems,
        remedy="Fetch the model again, or export and sign it anew; never serve these files.",
    )
