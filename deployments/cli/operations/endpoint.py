"""`headway endpoint`, `complete` and `rollback endpoint/NAME`: what is served, who may ask it, stop it, ask it, go back.

A key is shown once; what is kept is a hash. `endpoint render` writes what a deploy to Azure ML would put, as files for `az`,
and asks nobody. See docs/rollout.md, docs/endpoint.md and docs/azureml.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import in_home, say, short_ref
from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, Missing, Unknown
from tasks.common.home import home
from tasks.common.process import read_json
from tasks.security.audit import audited
from tasks.serving import keys
from tasks.serving.client import Sampling
from tasks.storage import open_files, open_store
from tasks.storage.store import find


def list_(as_json: Json = False) -> None:
    """List endpoints, the model that each serves, and whether it answers."""
    from tasks.serving.known import endpoint_of, known_endpoints

    served, silent = [], {}
    for name in _settled(known_endpoints):
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
    say({"endpoints": rows}, words or in_home("No endpoint yet", "`headway retrain` makes one."), as_json=as_json)


def stop(
    name: Annotated[str, typer.Argument(help="The name of the endpoint.")],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Stop an endpoint. The next `headway retrain` starts it again."""
    from tasks.serving.known import begun_endpoints, require_known

    _settled(begun_endpoints)
    name = require_known(home(), name, begun_endpoints)
    with asked("roll_back", as_, what=f"stop endpoint/{name}", reason=reason):
        _stop(name, reason)
    say({"ref": f"endpoint/{name}", "stopped": True}, f"endpoint/{name} is stopped", as_json=as_json)


def stop_all(reason: str) -> list[str]:
    """Stop every endpoint of the home, for `headway down --endpoints`, which asks for the right. Returns those that served."""
    from tasks.serving.known import begun_endpoints

    return [f"endpoint/{name}" for name in _settled(begun_endpoints) if _stop(name, reason)]


def _settled(which: Callable[[Path], list[str]]) -> list[str]:
    """Names of endpoints, once every deploy that was interrupted is settled: it may have a server, and not yet a name."""
    from tasks.serving.known import settle_all

    settle_all(home())
    return which(home())


def complete(
    endpoint: Annotated[str, typer.Argument(help="The name of the endpoint.")],
    text: Annotated[str, typer.Argument(help="The text to complete.")],
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="The largest number of tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling: the same seed gives the same tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be given up to four times.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a served model to complete a text."""
    from tasks.serving.known import ask

    answer = ask(home(), endpoint, text, Sampling(max_tokens, temperature, top_p, seed, tuple(stop or ())))
    say({"prompt": text, **answer}, text + answer["completion"], as_json=as_json)


def _stop(name: str, reason: str) -> bool:
    """Stop an endpoint; whether it served."""
    from tasks.serving.known import endpoint_of

    endpoint = endpoint_of(home(), name)
    served = endpoint.observe()
    output = {"what": f"endpoint/{name}", "reason": reason, "before": served.model_ref if served else None}
    with audited(open_store(home()), "stop endpoint", right="roll_back", **output):
        endpoint.stop()
    return served is not None


def roll_back(ref: str, *, to: str, dry_run: bool, reason: str, as_: str, as_json: bool) -> None:
    """Go back, and say how long it took. The champion is unchanged."""
    from tasks.registry.model_integrity import require_way_back
    from tasks.serving.known import go_back, require_known, served_model

    name = require_known(home(), ref)
    if to:
        raise ValueError(
            f"--to {to}: an endpoint goes back to the model before only. For another one: `headway rollback model/NAME --to {to} "
            "--reason TEXT`, then `headway retrain` with the data and settings that made it, which runs only the deploy"
        )
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
        words += "\nThe champion is unchanged: `headway rollback model/NAME` moves it."
    say(fields, words, as_json=as_json)


CALLER = r"[a-z0-9][a-z0-9._-]{0,62}"
Endpoint = Annotated[str, typer.Argument(help="The name of the endpoint.")]


def add_key(
    name: Endpoint,
    caller: Annotated[
        str, typer.Option("--caller", help="The caller who gets the key: lower-case letters, digits, dot, dash.")
    ],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Create a key and print it; it is shown only once. Once there is a key, the endpoint requires one from every caller."""
    bare, folder = _folder(name)
    if not re.fullmatch(CALLER, caller):
        raise ValueError(f"--caller {caller!r} is no name: lower case letters, digits, dot and dash, at most 63")
    payload = {"right": "promote", "reason": reason, "after": caller}
    with (
        asked("promote", as_, what=f"make a key of endpoint/{bare} for {caller}", reason=reason),
        _told("make key", bare, payload),
    ):
        key, shown = keys.add_key(folder, caller)
    fields = {"ref": f"endpoint/{bare}", "id": key.id, "caller": caller, "key": shown}
    say(fields, f"{shown}\n{key.id} of {caller}: keep the line above, it is not shown again", as_json=as_json)


def list_keys(name: Endpoint, as_json: Json = False) -> None:
    """List the keys of an endpoint, without their values."""
    bare, folder = _folder(name)
    rows = [
        {"id": key.id, "caller": key.caller, "created": _utc(key.created), "revoked": _utc(key.revoked)}
        for key in keys.read_keys(folder).keys
    ]
    words = [
        f"{r['id']:<16}{r['caller']:<24}{r['created']}  {r['revoked'] and 'revoked ' + r['revoked']}" for r in rows
    ]
    nothing = f"endpoint/{bare} asks for no key."
    say({"ref": f"endpoint/{bare}", "keys": rows}, "\n".join(words).rstrip() or nothing, as_json=as_json)


def revoke_key(
    name: Endpoint,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The ID of the key, as `list` shows it.")],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Revoke a key. The endpoint refuses it within a second."""
    bare, folder = _folder(name)
    payload = {"right": "roll_back", "reason": reason, "before": key_id}
    with (
        asked("roll_back", as_, what=f"revoke {key_id} of endpoint/{bare}", reason=reason),
        _told("revoke key", bare, payload),
    ):
        key = keys.revoke_key(folder, key_id)
    say(
        {"ref": f"endpoint/{bare}", "id": key.id, "caller": key.caller},
        f"{key.id} of {key.caller} is revoked",
        as_json=as_json,
    )


def _folder(name: str) -> tuple[str, Path]:
    from tasks.serving.known import require_known

    bare = require_known(home(), name)
    return bare, home() / "endpoints" / bare


def _told(action: str, bare: str, details: dict[str, str]) -> AbstractContextManager[object]:
    """An entry in the audit log around a change. No key is ever part of one."""
    return audited(open_store(home()), action, what=f"endpoint/{bare}", **details)


def _utc(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else ""


PLACEHOLDER = f"model/placeholder@{'0' * 64}"
REGION = "REGION-OF-THE-WORKSPACE"


def render(
    name: Annotated[str, typer.Argument(help="The name of the endpoint, as in deployment.endpoint.")],
    config: Config = None,
    model: Annotated[str, typer.Option(help="model/NAME@VERSION; by default the configuration's model.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="The folder to write the files to; by default they are printed.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Print or write the YAML of an endpoint and its deployment on Azure ML, and the rules around them. Contacts no service."""
    from tasks.config.files import load
    from tasks.serving.azureml.render import Rendering, files_of, require_complete

    wanted = [*(set_ or []), "deployment.backend=azureml", f"deployment.endpoint={name.removeprefix('endpoint/')}"]
    settings = load(config or "azureml", wanted)
    deployment = settings.served
    require_complete(deployment.azureml)
    kind, bare, version = parse_ref(model or settings.training.model, kind="model")
    pending = []
    try:
        manifest = find(open_store(home()), kind, bare, version)
        ref, content = manifest.ref, manifest.content.model_dump(mode="json")
    except (Unknown, Missing) as error:
        if model:
            raise
        ref, content = PLACEHOLDER, {"files": [], "inputs": []}
        why = error.message if isinstance(error, Missing) else f"there is no model/{bare} yet"
        pending.append(f"{why}: its reference is a placeholder")
    try:
        store = open_files(home(), deployment.azureml.store).uri
    except ValueError as error:
        store = "az://ACCOUNT/CONTAINER"
        pending.append(str(error))
    made = Rendering(deployment.endpoint, deployment, deployment.azureml.location or REGION)
    # Of the deployment that the next model would get.
    record = read_json(home() / "endpoints" / deployment.endpoint / "endpoint.json") or {}
    colour = "green" if record.get("colour") == "blue" else "blue"
    texts = files_of(made, colour, ref, files=content["files"], inputs=content["inputs"], store=store)
    fields = {"name": made.name, "colour": colour, "model": ref, "pending": pending, "files": texts}
    lines = [f"# not known yet: {each}" for each in pending]
    if to:
        to.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (to / file).write_text(text)
            lines.append(f"{to / file}")
    else:
        for file, text in texts.items():
            lines += [f"# file {file}", text.rstrip("\n"), ""]
    say(fields, "\n".join(lines).rstrip(), as_json=as_json)
