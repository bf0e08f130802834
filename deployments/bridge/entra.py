"""Tokens of Microsoft Entra that Event Grid and others send events with; what makes one right is tasks/azure/entra.py."""

from __future__ import annotations

from deployments.bridge.refusals import NotTaken, Unable
from tasks.azure import entra
from tasks.config.access import EntraConfig


class Entra:
    """One tenant, and who of it may send."""

    def __init__(self, config: EntraConfig) -> None:
        self._entra = entra.Entra(config)

    def check(self, token: str) -> str:
        """The client id that a token is of. Raises NotTaken (401; 403 for an application not listed), Unable without keys."""
        try:
            return self._entra.check(token)
        except entra.NotBelieved as error:
            raise NotTaken(error.status, str(error)) from error
        except entra.KeysAway as error:
            raise Unable(str(error), retry_after=error.retry_after) from error
