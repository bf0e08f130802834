"""Whether what endpoints serve, or would go back to, is signed by a key that counts today. It may have been revoked since.

An endpoint goes on with what it serves, and the watch says so (deployments/watch); nothing is moved onto it. What was changed on
the disk is tampering.py. See docs/trust.md, "A revoked key".
"""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.errors import IntegrityError, Unknown
from tasks.registry.signatures import require_signed
from tasks.registry.trust import Untrusted
from tasks.storage.store import Store, find


def require_way_back(home: Path, store: Store, endpoint: str, model: str) -> None:
    """Raise IntegrityError unless a signature of the model counts that an endpoint is to go back to."""
    try:
        require_signed(store, home, find(store, *parse_ref(model)))
    except (IntegrityError, Unknown) as error:
        raise IntegrityError(
            f"endpoint/{endpoint} does not go back to {model}: {error.message.removeprefix(f'{model}: ')}",
            remedy=f"What it serves stays. If you stand by {model}: `headway sign {model} --reason TEXT`. If not, deploy another "
            f"model, or `headway endpoint stop {endpoint} --reason TEXT`.",
        ) from error


def untrusted(home: Path, store: Store, model: str) -> str:
    """Why the key that signed a model does not count; empty when it does, and for what is not signed or was changed."""
    manifest = store.manifest(*parse_ref(model))
    try:
        if manifest:
            require_signed(store, home, manifest)
    except Untrusted as error:
        return error.message
    except IntegrityError:
        return ""
    return ""
