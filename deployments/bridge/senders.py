"""Who is believed: a token of Microsoft Entra, a shared secret, or a signature, as the settings say. See docs/webhook.md.

Any one that is configured is enough; a request that carries more than one must have all of them right. Where we cannot check
(a variable is not set, keys are away), that is our fault and not the sender's: Unable, not NotTaken.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable

from starlette.datastructures import Headers

from deployments.bridge import signatures
from deployments.bridge.entra import Entra
from deployments.bridge.refusals import NotTaken, Unable
from deployments.bridge.signatures import Signature
from deployments.configuration.events import WebhookConfig

SECRET_HEADER = "x-headway-secret"
TOKEN_HEADER = "authorization"
Check = Callable[[str, bytes], Signature | None]


class Senders:
    """The ways that senders of one webhook can prove themselves."""

    def __init__(self, config: WebhookConfig) -> None:
        self._config = config
        self._entra = Entra(config.entra) if config.entra else None
        ways: dict[str, Check | None] = {
            SECRET_HEADER: self._secret if config.secret else None,
            signatures.HEADER: self._signature if config.hmac else None,
            TOKEN_HEADER: self._token if self._entra else None,
        }
        self._checks = {header: check for header, check in ways.items() if check}

    @property
    def challenge(self) -> str:
        """What a request without a proof is told in `WWW-Authenticate`."""
        return "Bearer" if self._entra else "Headway"

    def check(self, headers: Headers, body: bytes) -> Signature | None:
        """Return when every proof that a request carries is right, with its signature if it has one.

        Raises NotTaken (401, 403), and Unable when it cannot be checked.
        """
        carried = [header for header in self._checks if header in headers]
        if not carried:
            raise NotTaken(401, f"the request proves nothing: it has none of {', '.join(self._checks)}")
        signature = None
        for header in carried:
            values = headers.getlist(header)
            if len(values) > 1:
                raise NotTaken(401, f"the request has {header} {len(values)} times")
            signature = self._checks[header](values[0], body) or signature
        return signature

    def _secret(self, value: str, _: bytes) -> None:
        """Compares hashes, so that not even the length of the secret takes time to tell."""
        both = value.encode("latin-1"), _variable(self._config.secret)
        if not hmac.compare_digest(*(hashlib.sha256(each).digest() for each in both)):
            raise NotTaken(401, "the shared secret is not right")

    def _signature(self, value: str, body: bytes) -> Signature:
        return signatures.check(value, body, _variable(self._config.hmac), max_age=self._config.max_age_seconds)

    def _token(self, value: str, _body: bytes) -> None:
        scheme, _, token = value.partition(" ")
        if scheme.lower() != "bearer":
            raise NotTaken(401, "the request has no bearer token")
        assert self._entra
        self._entra.check(token.strip())


def unset(config: WebhookConfig) -> dict[str, str]:
    """Secrets of the settings that this process does not have, by the name of their setting: whoever sends is answered 503."""
    result = {}
    for name, reference in (("secret", config.secret), ("hmac", config.hmac)):
        try:
            if reference:
                _variable(reference)
        except Unable as error:
            result[f"webhook, {name}"] = str(error)
    return result


def _variable(reference: str) -> bytes:
    """The secret that env:NAME stands for. Raises Unable when it is not there."""
    name = reference.removeprefix("env:")
    value = os.fsencode(os.environ.get(name, "")).strip()
    if not value:
        raise Unable(
            f"the variable {name} is not set where the bridge runs: export it, then `headway down` and `headway up`"
        )
    return value
