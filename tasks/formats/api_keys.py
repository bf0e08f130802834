"""API keys of an endpoint: how one looks, and the file that keeps who has which, with hashes only. Pure: text in, values out.

`keys.json` is written by tasks/serving/keys.py and read by what stands before the model, tasks/jobs/serving/keys.py. A key is
256 random bits, so one sha256 of it says as little as a slow hash would, and is looked up in no time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field

from tasks.common.errors import IntegrityError
from tasks.common.seal import opened, sealed

SCHEMA = "headway/keys/1"
PREFIX = "hwk_"
OWN = "headway"
"""The caller that Headway's own commands are, where keys are asked for."""


@dataclass(frozen=True)
class Key:
    """One key, as far as it is kept."""

    id: str
    """By which it is named and revoked; no secret."""
    caller: str
    """Whose it is: limits are counted by this name, over all keys of it."""
    sha256: str
    created: float
    """Seconds since the epoch."""
    revoked: float | None = None


@dataclass(frozen=True)
class Keys:
    """The keys of one endpoint. Once there was one, every caller must show one: also when all are revoked."""

    keys: tuple[Key, ...] = ()
    by_hash: dict[str, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_hash", {key.sha256: key for key in self.keys if key.revoked is None})

    def caller(self, shown: str) -> str | None:
        """Whose key was shown; None for one that is unknown or revoked."""
        result = self.by_hash.get(hashed(shown))
        return result.caller if result else None


def new_key() -> str:
    """A key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def read(text: str) -> Keys:
    """The keys of a file's text. Raises ValueError for what is no such file, and for a damaged one."""
    try:
        output = json.loads(opened(text.encode(), where="it"))
        if output["schema"] != SCHEMA:
            raise ValueError(f"its schema is {output['schema']!r}, and this release reads {SCHEMA!r}")
        return Keys(tuple(Key(**one) for one in output["keys"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no file of keys: {error!r}") from error
    except IntegrityError as error:
        raise ValueError(error.message) from error


def written(keys: Keys) -> str:
    """The text of the file."""
    text = json.dumps({"schema": SCHEMA, "keys": [asdict(key) for key in keys.keys]}, indent=1)
    return sealed(text.encode()).decode()
