"""Who asks? A caller shows an API key, or a token of Microsoft Entra; the file of keys is read again when it changes.

How a key and its file look is tasks/serving/keys.py. Neither a key nor a token is ever written down.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.config.access import AccessConfig, EntraConfig, require_asked
from tasks.serving import keys

if TYPE_CHECKING:
    from tasks.config.access import EntraConfig

# Tokens of Microsoft Entra that callers show, checked beside the server's loop. What makes one right is
# tasks/azure/entra.py.


TOKENS_KEPT = 1000
TOKEN_SECONDS = 60.0
"""Time that a token which was right is believed without looking again; it may expire meanwhile."""
TOKENS_CHECKED = 64
"""At once: each may have to wait for the authority."""


class Tokens:
    """The check. State: the tokens that were right a moment ago. The authority may have to be asked: threads do that."""

    def __init__(self, config: EntraConfig) -> None:
        from tasks.azure.entra import Entra  # loaded where it is wanted: a gateway that crashed is back a third sooner

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
        from tasks.azure.entra import KeysAway, NotBelieved

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


LOOK_SECONDS = 0.5
log = logging.getLogger("headway.serve")


class Nobody(Exception):
    """It is not known who asks. Nothing of what was shown is part of what is said."""

    def __init__(self, status: int, message: str, *, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class KeyFile:
    """The keys of an endpoint, as its file says now. State: what was read, and of which file.

    A file that goes away, or cannot be read, lets nobody in who was not in before: the keys that were read last count.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys = keys.Keys()
        self._seen: tuple[int, int, int] | None = None
        self._looked = -LOOK_SECONDS
        self._unreadable = False

    @property
    def asked(self) -> bool:
        """Whether there is a key, was one, or is a file that nobody can read."""
        self._look()
        return bool(self._keys.keys) or self._unreadable

    def caller(self, shown: str) -> str | None:
        """Whose key it is; None for a wrong one."""
        self._look()
        return self._keys.caller(shown)

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            state = self._path.stat()
            seen = (state.st_ino, state.st_mtime_ns, state.st_size)
            if seen != self._seen:
                self._keys, self._seen = keys.read(self._path.read_text(encoding="utf-8")), seen
            self._unreadable = False
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            if not self._unreadable:
                log.error("%s cannot be read: %s; the keys that were read before count", self._path, error)
            self._unreadable = True


class Door:
    """Decides who a request is of. State: the keys, and the tokens that were right a moment ago."""

    def __init__(self, access: AccessConfig, keys_file: Path | None) -> None:
        self._keys = KeyFile(keys_file)
        self._always = access.ask_for_keys or access.entra is not None
        self._tokens = Tokens(access.entra) if access.entra else None

    @property
    def guarded(self) -> bool:
        """Whether callers must show something."""
        return self._always or self._keys.asked

    async def caller(self, headers: Mapping[bytes, bytes]) -> str:
        """Who asks; empty where nobody has to say. Raises Nobody: 401, 403, or 503 while nobody can tell."""
        if not self.guarded:
            return ""
        kind, _, rest = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        shown = rest.strip() if kind.lower() == "bearer" else headers.get(b"api-key", b"").decode("latin-1").strip()
        if not shown:
            raise Nobody(401, "show an API key: `Authorization: Bearer KEY`, or the header `api-key`")
        if self._tokens and shown.count(".") == 2:
            return await self._tokens.caller(shown)
        caller = self._keys.caller(shown)
        if caller is None:
            raise Nobody(401, "the API key is unknown or revoked")
        return caller


def require_guarded(access: AccessConfig, keys_file: Path | None) -> None:
    """Raise ValueError for an address that others reach, and where nothing would be asked of them."""
    require_asked(access, KeyFile(keys_file).asked)
