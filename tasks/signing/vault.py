"""A key in Azure Key Vault, named by its identifier: it signs there, and only its public half ever comes here.

Verifying needs no vault: the public half is in the trust policy. How Azure knows us is handed in as a credential.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tasks.common.errors import Missing

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from cryptography.hazmat.primitives.asymmetric import ec

IDENTIFIER = re.compile(
    r"(?P<vault>https://[a-z0-9-]{3,24}\.(?:vault\.azure\.net|vault\.azure\.cn|vault\.usgovcloudapi\.net|managedhsm\.azure\.net))"
    r"/keys/(?P<name>[A-Za-z0-9-]{1,127})(?:/(?P<version>[0-9a-f]{32}))?/?"
)
ALGORITHMS = {256: "ES256", 384: "ES384"}
"""What the vault calls ECDSA, by the bits of the curve (RFC 7518, 3.4)."""
LIMITS: dict[str, Any] = {"connection_timeout": 5, "read_timeout": 10, "retry_total": 3, "retry_backoff_max": 5}
"""Seconds, and tries; the SDK's own are 300 s and 3 tries, which is minutes until a vault that is away is said to be."""


class VaultKey:
    """A key on P-256 or P-384 in a vault."""

    def __init__(self, identifier: str, credential: TokenCredential, **client: Any) -> None:
        """Look the key up; without a version in its identifier, the vault's current one is taken, and stays for this object.

        `client` goes to the SDK's clients. Raises ValueError for what is no identifier of such a key, Missing when the vault does
        not answer, does not know us or has no such key.
        """
        from azure.keyvault.keys import KeyClient
        from azure.keyvault.keys.crypto import CryptographyClient
        from cryptography.hazmat.primitives.asymmetric import ec

        named = IDENTIFIER.fullmatch(identifier)
        if not named:
            raise ValueError(f"{identifier!r} is no key: write https://VAULT.vault.azure.net/keys/NAME[/VERSION]")
        options = {**LIMITS, **client}
        with _said_plainly(identifier):
            result = KeyClient(named["vault"], credential, **options).get_key(named["name"], named["version"])

        curves: dict[str, ec.EllipticCurve] = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1()}
        held: Any = result.key
        curve = getattr(
            held.crv, "value", held.crv
        )  # an enumeration for what the SDK knows, a text for what it does not
        if curve not in curves:
            raise ValueError(f"{identifier} is no EC key on P-256 or P-384, with which Headway signs (curve: {curve})")
        x, y = int.from_bytes(held.x, "big"), int.from_bytes(held.y, "big")
        self._public = ec.EllipticCurvePublicNumbers(x, y, curves[curve]).public_key()
        self._client = CryptographyClient(result, credential, **options)
        self._algorithm = ALGORITHMS[self._public.curve.key_size]
        self._identifier = identifier

    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._public

    def sign(self, data: bytes) -> bytes:
        """A signature over `data`: its digest goes to the vault, and nothing else. Raises Missing."""
        from azure.keyvault.keys.crypto import SignatureAlgorithm
        from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

        digest = (hashlib.sha384 if self._algorithm == "ES384" else hashlib.sha256)(data).digest()
        with _said_plainly(self._identifier):
            raw = self._client.sign(SignatureAlgorithm(self._algorithm), digest).signature
        half = len(raw) // 2  # r and s, side by side (RFC 7518, 3.4); everybody else writes DER
        return bytes(encode_dss_signature(int.from_bytes(raw[:half], "big"), int.from_bytes(raw[half:], "big")))


@contextmanager
def _said_plainly(identifier: str) -> Iterator[None]:
    """The SDK's errors as ours, with what to do."""
    from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceNotFoundError

    try:
        yield
    except ClientAuthenticationError as error:
        remedy = "See `credential` of sign_with in trust.yaml, and log in the way that it names."
        raise Missing(
            f"the vault of {identifier} does not accept who we are: {_first(error)}", remedy=remedy
        ) from error
    except ResourceNotFoundError as error:
        raise Missing(f"there is no key {identifier}", remedy="Correct sign_with in trust.yaml.") from error
    except HttpResponseError as error:
        remedy = "It must be enabled, not expired, and allow us get and sign (role: Key Vault Crypto User)."
        raise Missing(f"the vault refuses to use {identifier}: {_first(error)}", remedy=remedy) from error
    except AzureError as error:
        remedy = "Check the network and the vault's firewall; then run the same command again."
        raise Missing(f"the vault of {identifier} does not answer: {_first(error)}", remedy=remedy) from error


def _first(error: Exception) -> str:
    """The first line: the SDK repeats itself in the others."""
    return next(iter(str(error).splitlines()), type(error).__name__)
