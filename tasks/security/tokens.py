"""Personal tokens: made at random, kept as a salted scrypt hash, compared in constant time. Who has one is policy.py."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode

SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""About 50 ms and 16 MB a try (RFC 7914). Tokens are 256 random bits, so the cost is against those who try many names."""
NOBODY = f"scrypt:{'A' * 22}==:{'A' * 43}="
"""Compared with when a name is unknown, so that it takes as long as a wrong token."""


def new_token() -> str:
    """A token of 256 random bits, to be shown once."""
    return f"hwt_{secrets.token_urlsafe(32)}"


def hashed(token: str, salt: bytes = b"") -> str:
    """What is kept of a token; without a salt, a new one is drawn."""
    salt = salt or secrets.token_bytes(16)
    made = hashlib.scrypt(token.encode(), salt=salt, dklen=32, **SCRYPT)
    return f"scrypt:{urlsafe_b64encode(salt).decode()}:{urlsafe_b64encode(made).decode()}"


def fits(token: str, kept: str) -> bool:
    """Whether a token is the one that is kept."""
    return hmac.compare_digest(hashed(token, urlsafe_b64decode(kept.split(":")[1])), kept)
