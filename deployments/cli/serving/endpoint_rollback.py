"""`headway rollback endpoint/NAME`: the traffic goes to the model before. Of artifacts, deployments/cli/registry/history.py. See
docs/rollout.md."""

from __future__ import annotations

import time
from functools import partial

from deployments.cli.operations.users import asked
from deployments.cli.output import say, short_ref


def rollback(ref: str, *, to: str, dry_run: bool, reason: str, as_: str, as_json: bool) -> None:
    """Go back, and say how long it took. The champion stays who it is."""
    from tasks.common.home import home
    from tasks.common.process import read_json
    from tasks.registry.model_integrity import require_way_back
    from tasks.security.audit import audited
    from tasks.serving.known import go_back, require_known, served_model
    from tasks.storage import open_store

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
