"""The endpoints of a home: which there are, what they serve, and asking them. One endpoint's own life is
tasks/serving/local/endpoint.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.common.errors import GateFailed, Missing, Unknown
from tasks.common.process import locked, read_json
from tasks.serving import open_endpoint
from tasks.serving.client import Sampling, complete
from tasks.serving.endpoint import Served, ServingEndpoint
from tasks.serving.journal import accept, refused_models
from tasks.serving.keys import own_key
from tasks.serving.servers import port_free

log = logging.getLogger("headway.endpoints")


def endpoint_of(home: Path, name: str, backend: str = "") -> ServingEndpoint:
    """The endpoint of a name, whether it was ever deployed or not; `backend` is where it is wanted, empty: where it is."""
    return open_endpoint(home / "endpoints", name, backend)


def known_endpoints(home: Path) -> list[str]:
    """Names of all endpoints that were deployed, sorted."""
    return sorted(path.parent.name for path in (home / "endpoints").glob("*/endpoint.json"))


def begun_endpoints(home: Path) -> list[str]:
    """Those, and the ones whose first deploy to Azure ML did not end well: a managed endpoint may stand there all the same."""
    begun = {path.parent.name for path in (home / "endpoints").glob("*/azureml.json")}
    return sorted(begun.union(known_endpoints(home)))


def require_known(home: Path, name: str, among: Callable[[Path], list[str]] = known_endpoints) -> str:
    """The name without `endpoint/`. Raises Unknown when there is no such endpoint."""
    bare = name.removeprefix("endpoint/")
    known = among(home)
    if bare not in known:
        hint = f"There are: {', '.join(known)}." if known else "None was deployed yet."
        raise Unknown(f"there is no endpoint {bare!r}", remedy=f"{hint} `headway retrain` deploys one.")
    return bare


def served_model(home: Path, name: str) -> str:
    """Reference of the model that an endpoint serves, or served before it was stopped."""
    record = read_json(home / "endpoints" / require_known(home, name) / "endpoint.json")
    return str(record["model_ref"])


def models_before(home: Path) -> dict[str, str]:
    """What endpoints would go back to, by reference: the name of the endpoint."""
    result = {}
    for name in known_endpoints(home):
        before = (read_json(home / "endpoints" / name / "endpoint.json") or {}).get("previous") or {}
        if "model_ref" in before:
            result[str(before["model_ref"])] = name
    return result


def ask(home: Path, name: str, prompt: str, how: Sampling) -> dict[str, Any]:
    """Ask a served model to go on with a text: completion, model, usage. Raises Missing when it is stopped."""
    bare = require_known(home, name)
    served = endpoint_of(home, bare).observe()
    if served is None:
        raise Missing(f"endpoint/{bare} is stopped", remedy="`headway retrain` starts it again.")
    if _in_the_cloud(home, bare):
        from tasks.serving.azureml.probes import complete_there

        return complete_there(home / "endpoints" / bare, prompt, how)
    output = complete(served.url, prompt, how, key=own_key(home / "endpoints" / bare))
    return {"completion": output["choices"][0]["text"], "model": output["model"], "usage": output["usage"]}


def lock_of(home: Path, name: str) -> Path:
    """Held by whoever changes what an endpoint serves."""
    return home / "endpoints" / f"{name}.lock"


def go_back(home: Path, name: str, reason: str, *, require: Callable[[str], None]) -> Served:
    """Give an endpoint's traffic to the model before, at once; a deploy that is under way is taken back instead.

    `require` is called with the reference of the model before, and raises when it must not serve. Raises Unknown, ValueError when
    no model stood before, and JobFailed when it does not get ready again.
    """
    bare = require_known(home, name)
    endpoint = endpoint_of(home, bare)
    taken = endpoint.ask_back(reason)  # before the lock: whoever deploys holds it
    with locked(lock_of(home, bare)):
        return endpoint.go_back(reason, taken=taken, require=require)


def settle_all(home: Path) -> dict[str, str]:
    """Finish or revert what deployers that died left open, by endpoint: `done` or `reverted`. Who is at work is left alone."""
    result = {}
    for journal in sorted((home / "endpoints").glob("*/journal.jsonl")):
        name = journal.parent.name
        try:
            with locked(lock_of(home, name), waiting=_leave):
                if output := endpoint_of(home, name).settle():
                    result[name] = output
        except BlockingIOError:
            continue
        except Missing as error:
            log.warning("endpoint/%s is settled later: %s", name, error)
    return result


def tidy_all(home: Path, now: float) -> list[str]:
    """Delete what is over on Azure ML: models that were kept warm, test endpoints that expired. Who is at work is left alone."""
    from tasks.serving.azureml.endpoint import AzureMlEndpoint

    deleted = []
    for name in [one for one in known_endpoints(home) if _in_the_cloud(home, one)]:
        try:
            with locked(lock_of(home, name), waiting=_leave):
                deleted += AzureMlEndpoint(home / "endpoints", name).tidy(now)
        except BlockingIOError:
            continue
    return deleted


def _in_the_cloud(home: Path, name: str) -> bool:
    return (home / "endpoints" / name / "azureml.json").exists()


def require_accepted(home: Path, name: str, model_ref: str) -> None:
    """Raise GateFailed for a model that a person rolled back here: it is deployed again when a person promotes it."""
    output = refused_models(home / "endpoints" / name).get(model_ref)
    if output:
        raise GateFailed(
            f"{model_ref} was rolled back on endpoint/{name}: {output['reason']}",
            stage="deploy",
            checks=[{"name": "rolled back", "measured": output["reason"], "limit": "promoted again by someone"}],
            remedy=f"If it is to serve again: `headway promote {model_ref} --reason TEXT`, then the same run again.",
        )


def accept_again(home: Path, model_ref: str) -> list[str]:
    """A person promoted a model: endpoints that it was rolled back on, which are returned, take it again."""
    names = [name for name in known_endpoints(home) if model_ref in refused_models(home / "endpoints" / name)]
    for name in names:
        accept(home / "endpoints" / name, model_ref)
    return [f"endpoint/{name}" for name in names]


def _leave() -> None:
    raise BlockingIOError


def require_port(home: Path, name: str, port: int | None) -> None:
    """Raise ValueError when a wanted port is taken by something else than this endpoint."""
    if port is None:
        return
    served = endpoint_of(home, name).observe()
    if served is None or served.port != port:
        port_free(port)
