"""`headway endpoint`, `complete` and `rollback endpoint/NAME`: what is served, stop it, ask it, go back. See docs/rollout.md."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import say, short_ref
from tasks.common.errors import HeadwayError
from tasks.common.home import home
from tasks.common.process import read_json
from tasks.security.audit import audited
from tasks.serving.client import Sampling
from tasks.storage import open_store


def list_(as_json: Json = False) -> None:
    """List endpoints, the model that each serves, and whether it answers."""
    from tasks.serving.known import endpoint_of, known_endpoints, settle_all

    settle_all(home())  # a deploy that was killed may have a server, and not yet a name here
    served, silent = [], {}
    for name in known_endpoints(home()):
        try:
            served.append((name, endpoint_of(home(), name).observe()))
        except (HeadwayError, ValueError) as error:  # of a cloud that does not answer
            served.append((name, None))
            silent[name] = str(error)
    rows = [
        {
            "ref": f"endpoint/{name}",
            "url": s.url if s else None,
            "model": s.model_ref if s else None,
            "ready": bool(s and s.ready),
            "error": silent.get(name),
        }
        for name, s in served
    ]
    words = [f"{r['ref']:<24}{r['url'] or r['error'] or 'stopped':<28}{short_ref(str(r['model'] or ''))}" for r in rows]
    say({"endpoints": rows}, words or "No endpoint yet.", as_json=as_json)


def stop(
    name: Annotated[str, typer.Argument(help="Name of the endpoint.")],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Stop an endpoint. The next `headway retrain` starts it again."""
    from tasks.serving.known import require_known, settle_all

    settle_all(home())
    name = require_known(home(), name)
    with asked("roll_back", as_, what=f"stop endpoint/{name}", reason=reason):
        _stop(name, reason)
    say({"ref": f"endpoint/{name}", "stopped": True}, f"endpoint/{name} is stopped", as_json=as_json)


def stop_all(reason: str) -> None:
    """Stop every endpoint of the home, for `headway down --endpoints`, which asks for the right."""
    from tasks.serving.known import known_endpoints, settle_all

    settle_all(home())
    for name in known_endpoints(home()):
        _stop(name, reason)


def complete(
    endpoint: Annotated[str, typer.Argument(help="Name of the endpoint.")],
    text: Annotated[str, typer.Argument(help="The text to complete.")],
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Most tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; up to four times.")] = None,
    as_json: Json = False,
) -> None:
    """Ask a served model to complete a text."""
    from tasks.serving.known import ask

    answer = ask(home(), endpoint, text, Sampling(max_tokens, temperature, top_p, seed, tuple(stop or ())))
    say({"prompt": text, **answer}, text + answer["completion"], as_json=as_json)


def _stop(name: str, reason: str) -> None:
    from tasks.serving.known import endpoint_of

    endpoint = endpoint_of(home(), name)
    served = endpoint.observe()
    output = {"what": f"endpoint/{name}", "reason": reason, "before": served.model_ref if served else None}
    with audited(open_store(home()), "stop endpoint", right="roll_back", **output):
        endpoint.stop()


def roll_back(ref: str, *, to: str, dry_run: bool, reason: str, as_: str, as_json: bool) -> None:
    """Go back, and say how long it took. The champion stays who it is."""
    from tasks.registry.model_integrity import require_way_back
    from tasks.serving.known import go_back, require_known, served_model

    name = require_known(home(), ref)
    if to:
        raise ValueError(f"--to {to}: an endpoint goes back to the model before only; deploy another with its settings")
    before = served_model(home(), name)
    record = read_json(home() / "endpoints" / name / "endpoint.json")
    previous = (record.get("previous") or {}).get("model_ref")
    fields = {"ref": f"endpoint/{name}", "before": before, "dry_run": dry_run}
    require = partial(require_way_back, home(), open_store(home()), name)
    if dry_run:
        if previous:
            require(previous)
        words = f"endpoint/{name} would serve {short_ref(previous)} again" if previous else "no model stood before"
        say({**fields, "after": previous, "changed": False}, words, as_json=as_json)
        return
    if not reason.strip():
        raise ValueError(f"say why: --reason TEXT goes into the audit log with the rollback of endpoint/{name}")
    with asked("roll_back", as_, what=f"roll back endpoint/{name}", reason=reason):
        output = {"what": f"endpoint/{name}", "reason": reason, "before": before, "after": previous}
        with audited(open_store(home()), "rollback endpoint", right="roll_back", **output):
            began = time.monotonic()
            served = go_back(home(), name, reason, require=require)
    seconds = round(time.monotonic() - began, 2)
    changed = served.model_ref != before
    fields |= {"after": served.model_ref, "changed": changed, "seconds": seconds}
    did = "serves it again" if changed else "keeps it: the deploy that was under way was taken back"
    words = f"{short_ref(served.model_ref)}: endpoint/{name} {did}, after {seconds} s"
    if changed:
        words += "\nThe champion stays who it was: `headway rollback model/NAME` moves it."
    say(fields, words, as_json=as_json)
