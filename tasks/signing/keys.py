"""Keys on elliptic curves: the home's own, any other in a PEM file, and how each signs. A key in a vault is vault.py."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import locked, private_folder, whole, write_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

KEY_NAME = "signing.pem"
SECRET_BYTES = 64
CURVES = ("secp256r1", "secp384r1", "secp521r1")
"""NIST's P-256, P-384 and P-521, which model-signing knows; each with the digest of its size. secp256k1 is none of them."""


class Signer(Protocol):
    """Who holds a private key, or can have something signed by it."""

    def public_key(self) -> ec.EllipticCurvePublicKey: ...

    def sign(self, data: bytes) -> bytes:
        """An ECDSA signature (DER) over `data`, hashed as the curve asks."""
        ...


class LocalKey:
    """A private key in a PEM file without a password."""

    def __init__(self, path: Path) -> None:
        """Raises Missing when there is no file, ValueError when it is no such key or everybody can read it."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if not path.is_file():
            raise Missing(f"the signing key {path} is not there", remedy="Name a file that holds a private key (PEM).")
        if path.stat().st_mode & 0o007:
            raise ValueError(f"the signing key {path} can be read by everybody: run `chmod 600 {path}`")
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} holds no private key without a password (PEM): {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{path} is no elliptic curve key; make one on P-256")
        require_curve(key.public_key(), str(path))
        self._key = key

    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._key.public_key()

    def sign(self, data: bytes) -> bytes:
        return bytes(self._key.sign(data, _ecdsa(self._key.curve.key_size)))


def ensure_secret(path: Path, *, lock: Path, lost: str, remedy: str) -> bytes:
    """A secret that a home keeps in a file (64 hexadecimal digits, 0600), made on first use.

    Raises IntegrityError for a file of another length; `lost` says what does not work without the secret.
    """
    with locked(lock):
        if not path.exists():
            private_folder(path.parent)
            write_text(path, secrets.token_hex(SECRET_BYTES // 2))
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise IntegrityError(f"{path} holds {len(secret)} bytes, not a key of {SECRET_BYTES}: {lost}", remedy=remedy)
    return secret


def ensure_key(folder: Path) -> Path:
    """The private key of a folder (0600, in a folder 0700), made on first use with its public key beside it."""
    private_folder(folder).chmod(0o700)  # an earlier release made some for everybody to read
    key = folder / KEY_NAME
    if not key.exists():
        _make_key(key)
    if key.stat().st_mode & 0o077:
        raise ValueError(
            f"the signing key {key} can be read by others: run `chmod 600 {key}`, or delete it for a new one"
        )
    if not public_key_of(key).exists():
        with whole(public_key_of(key)) as file:
            file.write(pem_of(LocalKey(key).public_key()))
    return key


def public_key_of(key: Path) -> Path:
    """Where the public half of a private key lies."""
    return key.with_suffix(".pub")


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The key of a PEM file. Raises Missing without the file, ValueError when it holds no such public key."""
    if not path.is_file():
        raise Missing(f"the public key {path} is not there", remedy="Name a file that holds a public key (PEM).")
    return parse_public_key(path.read_bytes(), str(path))


def parse_public_key(pem: bytes, what: str) -> ec.EllipticCurvePublicKey:
    """The key of a PEM text; `what` names it in an error. Raises ValueError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise ValueError(f"{what} holds no public key: {error}; name a PEM file") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{what} is no elliptic curve key; name the public half of a P-256 key")
    require_curve(key, what)
    return key


def require_curve(key: ec.EllipticCurvePublicKey, what: str) -> None:
    """Raise ValueError for a curve that is not one of CURVES."""
    if key.curve.name not in CURVES:
        raise ValueError(f"{what} is a key on {key.curve.name}; signatures here are on {', '.join(CURVES)}")


def key_id(key: ec.EllipticCurvePublicKey) -> str:
    """What a key is called in statements: sha256, in hex, of its SubjectPublicKeyInfo (RFC 5280) in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def pem_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as a PEM text."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def require_signature(key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> None:
    """Raise IntegrityError unless the owner of a key signed exactly these bytes."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, data, _ecdsa(key.curve.key_size))
    except InvalidSignature as error:
        raise IntegrityError(f"the signature was not made over this content by the key {key_id(key)[:16]}") from error


def _ecdsa(bits: int) -> ec.ECDSA:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512

    return ec.ECDSA({384: SHA384(), 521: SHA512()}.get(bits, SHA256()))


def _make_key(key: Path) -> None:
    """Create-only, so that two processes that start together end with one key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with suppress(FileExistsError), whole(key, replace=False) as file:
        file.write(pem)
