"""Whether what endpoints serve, or would go back to, is signed by a key that counts today. It may have been revoked since.

An endpoint goes on with what it serves, and the watch says so (deployments/watch); nothing is moved onto it. What was changed on
the disk is model_integrity.py. See docs/trust.md, "A revoked key".
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, IntegrityError, Unknown
from tasks.security.signatures import require_signed
from tasks.security.trust import Untrusted
from tasks.serving.known import endpoint_of, known_endpoints
from tasks.serving.servers import barring, rungs_before
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


class Untrusting(NamedTuple):
    """An endpoint in service whose model is signed by a key that does not count."""

    endpoint: str
    model: str
    why: str


def untrusted_endpoints(home: Path, store: Store) -> list[Untrusting]:
    """The endpoints that serve what a key signed that was revoked since, is not known, or may not sign it."""
    results = []
    for name in known_endpoints(home):
        served = endpoint_of(home, name).serves_from()
        why = untrusted(home, store, served.model_ref) if served else ""
        if served and why and (served.running or _answers(home, name)):
            results.append(Untrusting(name, served.model_ref, why))
    return results


def bar_rungs(home: Path, store: Store) -> list[Untrusting]:
    """Keep models whose key does not count from answering for the one in service, and let those answer whose key counts again.

    Returns what was barred that was not yet.
    """
    results = []
    for name in known_endpoints(home):
        folder = home / "endpoints" / name
        for model in sorted(rungs_before(folder)):
            mark, why = barring(folder, model), untrusted(home, store, model)
            if why and not mark.exists():
                mark.parent.mkdir(exist_ok=True)
                mark.touch()
                results.append(Untrusting(name, model, why))
            elif not why:
                mark.unlink(missing_ok=True)
    return results


def _answers(home: Path, name: str) -> bool:
    """Whether an endpoint that runs elsewhere serves; one that cannot be asked now does, as far as anybody knows."""
    try:
        return endpoint_of(home, name).observe() is not None
    except (HeadwayError, ValueError):
        return True
