"""What a stage uses to make a model the champion: ask whether it may, sign, require a signature, move the alias.

All of it is in the audit log. Who has which right is answered by tasks/security/policy.py.
The rest of a stage's tools is tasks/orchestration/stage_context.py; whose signature counts is tasks/security/signatures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from tasks.artifacts import Artifact, Model, Pending, parse_ref
from tasks.lineage import messages
from tasks.orchestration.run import Lifecycle, code_version, current
from tasks.orchestration.stage_context import at_work, stored
from tasks.registry.approvals import asked_about, require_standing
from tasks.registry.logged_model import offered
from tasks.registry.model_integrity import untrusted
from tasks.registry.promoting import compared_with
from tasks.registry.refs import aliases, move_ref
from tasks.security import signatures
from tasks.security.audit import audited
from tasks.security.policy import require, require_of
from tasks.storage.manifest import Manifest
from tasks.storage.store import Document, find


@contextmanager
def logged(action: str, **details: Any) -> Iterator[None]:
    """Make a change inside that the audit log tells of before; see `audited`."""
    run = (at_work().lifecycle.flow_run or {}).get("id")
    with audited(at_work().lifecycle.store, action, **details, **({"flow_run": run} if run else {})):
        yield


def require_right(kind: str, subject: Artifact, terms: Mapping[str, str], *, what: str) -> str:
    """Raise Refused unless a person approved exactly this in this run, and that counts still, or who acts may promote and so may
    everybody who handed the run to the platform.

    Gives what the audit log calls the approval by; empty where who acts may.
    """
    run = at_work().lifecycle
    result = run.approved.get(asked_about(kind, subject.ref, terms))
    if result is None or dict(result[0].terms) != dict(terms):
        require(run.home, "promote", what=what)
        require_of(run.home, run.starters, "promote", what=what)
        return ""
    asked, given = result
    require_standing(run.home, run.store, asked, given)
    return given.digest


def make_champion(model: Model, *, reason: str) -> None:
    """Make a model the champion: the ref moves with an audit entry, and MLflow's registry is told.

    Raises IntegrityError for a model whose signature does not count, and Conflict when it was compared with another champion
    than there is now: nothing is registered then.
    """
    work = at_work()
    require_signed(model)
    store, name = work.lifecycle.store, model.name
    inputs = stored(model).provenance.inputs
    start = require_same_champion(model)
    work.lifecycle.require_ours()
    before = move_ref(store, f"{name}/champion", model.ref, inputs=inputs, reason=reason, start=start)
    previous = aliases(store, name).get("previous", "")
    _register(work.lifecycle, work.run, stored(model), alias="champion", before=before or "", previous=previous)


def require_same_champion(model: Model) -> Document | Literal["now"] | None:
    """Where the champion's ref must stand for the model to become the champion.

    Raises Conflict when another model became the champion since this one was compared.
    """
    run = at_work().lifecycle
    return compared_with(run.store, model.ref, seen=run.champion_place)


def challenge(model: Model) -> None:
    """Note what was exported as the one that challenges the champion, until it is promoted or another one is exported.

    A step of a flow, between two stages; nothing in a dry run, and where nothing was exported. Raises IntegrityError for a model
    whose signature does not count: nothing is registered then.
    """
    run = current()
    if isinstance(model, Pending):
        return
    now, name = aliases(run.store, model.name), f"{model.name}/challenger"
    if run.spool is None or model.ref in (now.get("champion"), now.get("challenger")):
        return
    manifest = find(run.store, *parse_ref(model.ref))
    signatures.require_signed(run.store, run.home, manifest)
    run.require_ours()
    move_ref(run.store, name, model.ref, inputs=manifest.provenance.inputs, reason="exported, not promoted")
    _register(run, run.run or "", manifest, alias="challenger", before=now.get("champion", ""))


def _register(
    lifecycle: Lifecycle, run: str, model: Manifest, *, alias: str, before: str, previous: str | None = None
) -> None:
    """Tell MLflow's registry of a version and of the name that it has now."""
    scores = lifecycle.outcomes["evaluate"].metrics if "evaluate" in lifecycle.outcomes else {}
    facts = {
        "Model": model.ref,
        "Bits per byte": f"{scores['bits_per_byte']:.4f}" if "bits_per_byte" in scores else "",
        "Dataset": lifecycle.result.dataset or "",
        "Code": code_version()[0] or "",
        "Configuration": lifecycle.config_digest,
    }
    lifecycle.need_spool().register(
        lifecycle.run or run,
        name=model.provenance.name,
        uri=lifecycle.store.uri_of(model),
        alias=alias,
        tags=messages.version_tags(facts),
        note=messages.version_note(facts, before if before != model.ref else ""),
        about=messages.MODEL_NOTE,
        previous=previous,
        model=offered(
            lifecycle.store,
            lifecycle.home,
            model,
            lifecycle.need_spool().folder / "models" / model.version,
            measuring={name: outcome.run for name, outcome in lifecycle.outcomes.items()},
        ),
    )


def require_signer(kind: type[Artifact], name: str) -> None:
    """Raise IntegrityError or Missing unless what is about to be made can be signed: before the work, not after it."""
    signatures.require_signer(at_work().lifecycle.home, kind.KIND, name)


def sign(artifact: Artifact) -> None:
    """Sign what this stage published, as it was published, with the home's key.

    Raises IntegrityError when the trust policy does not let it.
    """
    work = at_work()
    signatures.sign(work.lifecycle.store, work.lifecycle.home, work.made[artifact.ref])


def require_signed(artifact: Artifact) -> None:
    """Raise IntegrityError unless somebody trusted signed this artifact as it is, and stands by it."""
    work = at_work()
    signatures.require_signed(work.lifecycle.store, work.lifecycle.home, stored(artifact))


def why_untrusted(model: str) -> str:
    """Why the key that signed a model, by its reference, does not count; empty when it does."""
    work = at_work()
    return untrusted(work.lifecycle.home, work.lifecycle.store, model)
