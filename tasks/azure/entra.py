"""Tokens of Microsoft Entra: is this one made out to us, by our tenant, for an application that may send, or ask?

What an authority publishes (its issuer and the keys that it signs with) is had from its OpenID configuration, once an hour, and
sooner for a key that is not known, but not within five seconds. While it is away, keys that we have count for a day. Only
the authority of the settings is ever asked. The format of a token: https://learn.microsoft.com/entra/identity-platform/
access-token-claims-reference; RS256 is the only algorithm that Entra signs with, and the only one that is believed.

Two doors ask here: the bridge of events (deployments/bridge/webhook.py) and the edge of an endpoint
(tasks/jobs/serving/api_middleware.py).
"""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from tasks.config.access import EntraConfig

FRESH_SECONDS = 3600.0
COUNT_SECONDS = 24 * 3600.0
AGAIN_SECONDS = 5.0
TIMEOUT_SECONDS = 3.0
LEEWAY_SECONDS = 60.0
TOKEN_CHARACTERS = 8192
"""A longer token is not looked into: those of Entra for an application have two thousand or so."""
FORMS = {"1.0": ("", "appid"), "2.0": ("/v2.0", "azp")}
"""By `ver` of a token: where its issuer is published, below the tenant, and the claim that names the client."""
REQUIRED = ["exp", "nbf", "iss", "aud", "tid"]


class NotBelieved(Exception):
    """The token is at fault. Nothing of it is part of what is said."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KeysAway(Exception):
    """The authority's keys cannot be had now: nobody knows whether the token is right."""

    def __init__(self, message: str, *, retry_after: float = 30.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Entra:
    """One tenant, and who of it may come in."""

    def __init__(self, config: EntraConfig) -> None:
        self._config = config
        self._published = {version: _Published(config, path) for version, (path, _) in FORMS.items()}

    def check(self, token: str) -> str:
        """The client id that a token is of. Raises NotBelieved (401; 403 where its application is not listed), KeysAway."""
        if len(token) > TOKEN_CHARACTERS:
            raise NotBelieved(401, "the token is too long")
        try:
            version, key_id = _form(token)
            issuer, key = self._published[version].key(key_id)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=["RS256"],
                audience=self._config.audience,
                issuer=issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED, "strict_aud": True, "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            # What is wrong, by the kind of error: its text may quote the token
            words = {
                "ExpiredSignatureError": "it has expired",
                "ImmatureSignatureError": "it is not valid yet",
                "InvalidAudienceError": "it is made out to somebody else",
                "InvalidIssuerError": "it is of another issuer",
                "InvalidSignatureError": "its signature is not right",
                "InvalidAlgorithmError": "it is not signed with RS256",
                "InvalidKeyError": "its key is too short",
                "MissingRequiredClaimError": "a claim is missing",
                "DecodeError": "it is no token",
            }.get(type(error).__name__, type(error).__name__)
            raise NotBelieved(401, f"the token is not believed: {words}") from error
        if claims["tid"] != self._config.tenant:
            raise NotBelieved(401, "the token is of another tenant")
        client = claims.get(FORMS[version][1])
        if client not in self._config.applications:
            raise NotBelieved(403, "the token is of an application that is not listed")
        return str(client)


class _Published:
    """What an authority publishes for one form of token. State: its issuer and keys, when they were had, and when asked for."""

    def __init__(self, config: EntraConfig, path: str) -> None:
        self._tenant = config.tenant
        self._authority = config.authority
        self._path = path
        self._lock = threading.Lock()
        self._issuer = ""
        self._keys: dict[str, Any] = {}
        self._had = self._asked = -COUNT_SECONDS
        self._why = ""

    def key(self, key_id: str) -> tuple[str, Any]:
        """The issuer, and its key of that id; asks the authority where that is due. Raises NotBelieved and KeysAway.

        A key that still counts is given at once, and asked for again beside that: an authority that hangs keeps nobody.
        Who names another key while it is asked is told so at once: at most one thread waits for it.
        """
        known, now = self._keys.get(key_id), time.monotonic()
        if known is not None and now - self._had < COUNT_SECONDS:
            if self._stale(now) and not self._lock.locked():
                threading.Thread(target=self._refresh, daemon=True).start()
            return self._issuer, known
        if not self._lock.acquire(blocking=False):
            raise KeysAway("the keys are being asked for", retry_after=1.0)
        try:
            now = time.monotonic()
            due = key_id not in self._keys or now - self._had > FRESH_SECONDS
            asks = due and now - self._asked >= AGAIN_SECONDS
            if asks:
                self._ask(now)
            if now - self._had >= COUNT_SECONDS:
                raise KeysAway(f"the keys of {self._authority} cannot be fetched: {self._why}")
            if key_id in self._keys:
                return self._issuer, self._keys[key_id]
            if asks and self._had == now:
                raise NotBelieved(401, "the token is signed with a key that its authority does not publish")
            # It may be a new key: a sender that is told 401 now would drop its event.
            raise KeysAway("a token names a key that is not known yet", retry_after=self._asked + AGAIN_SECONDS - now)
        finally:
            self._lock.release()

    def _stale(self, now: float) -> bool:
        return now - self._had > FRESH_SECONDS and now - self._asked >= AGAIN_SECONDS

    def _refresh(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._stale(now):
                self._ask(now)

    def _ask(self, now: float) -> None:
        """Have issuer and keys as they are published now. Keys that lie elsewhere are not asked for."""
        self._asked = now
        loopback = self._authority.startswith("http://")
        try:
            with httpx.Client(timeout=TIMEOUT_SECONDS, follow_redirects=False, trust_env=not loopback) as client:
                output = _get(client, f"{self._authority}/{self._tenant}{self._path}/.well-known/openid-configuration")
                issuer, keys_at = str(output["issuer"]), str(output["jwks_uri"])
                if urlsplit(keys_at)[:2] != urlsplit(self._authority)[:2]:
                    raise ValueError(f"its keys are said to be at {keys_at!r}")
                if self._tenant not in issuer:
                    raise ValueError(f"it says that it is {issuer!r}, not the tenant {self._tenant}")
                results = [
                    key
                    for key in _get(client, keys_at)["keys"]
                    if key.get("kty") == "RSA" and key.get("use", "sig") == "sig" and isinstance(key.get("kid"), str)
                ]
                keys = {key["kid"]: jwt.PyJWK(key, algorithm="RS256").key for key in results}
                self._issuer, self._keys = issuer, keys
        except (httpx.HTTPError, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
            self._why, self._asked = f"{type(error).__name__}: {error}", time.monotonic()
        else:
            self._had, self._why = now, ""


def _form(token: str) -> tuple[str, str]:
    """Version of a token and id of its key, as it says itself."""
    try:
        header = jwt.get_unverified_header(token)
        version = jwt.decode(token, options={"verify_signature": False}).get("ver")
    except (RecursionError, ValueError) as error:
        raise NotBelieved(401, "the token is not believed: it is no token") from error
    if header.get("alg") != "RS256":
        raise NotBelieved(401, "the token is not signed with RS256")
    if not isinstance(header.get("kid"), str):
        raise NotBelieved(401, "the token names no key")
    if not isinstance(version, str) or version not in FORMS:
        raise NotBelieved(401, "the token is of no version that is known")
    return version, header["kid"]


def _get(client: httpx.Client, url: str) -> dict[str, Any]:
    answer = client.get(url)
    answer.raise_for_status()
    output: dict[str, Any] = answer.json()
    return output
