"""Tokens of Microsoft Entra that callers show, checked beside the server's loop. What makes one right is tasks/azure/entra.py."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from tasks.azure.entra import Entra, KeysAway, NotBelieved
from tasks.config.access import EntraConfig
from tasks.jobs.serving.keys import Nobody

TOKENS_KEPT = 1000
TOKEN_SECONDS = 60.0
"""Time that a token which was right is believed without looking again; it may expire meanwhile."""
TOKENS_CHECKED = 64
"""At once: each may have to wait for the authority."""


class Tokens:
    """The check. State: the tokens that were right a moment ago. The authority may have to be asked: threads do that."""

    def __init__(self, config: EntraConfig) -> None:
        self._entra = Entra(config)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="entra")
        self._checking = 0
        self._right: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    async def caller(self, token: str) -> str:
        name = hashlib.sha256(token.encode()).digest()
        client, until = self._right.get(name, ("", 0.0))
        if time.monotonic() >= until:
            client = await self._check(token)
            self._right[name] = (client, time.monotonic() + TOKEN_SECONDS)
            while len(self._right) > TOKENS_KEPT:
                self._right.popitem(last=False)
        return f"entra:{client}"

    async def _check(self, token: str) -> str:
        if self._checking >= TOKENS_CHECKED:
            raise Nobody(503, "too many tokens are being checked", retry_after=1)
        self._checking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._entra.check, token)
        except NotBelieved as error:
            raise Nobody(error.status, str(error)) from error
        except KeysAway as error:
            raise Nobody(503, str(error), retry_after=max(1, round(error.retry_after))) from error
        finally:
            self._checking -= 1
