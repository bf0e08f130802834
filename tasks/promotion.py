"""What a stage may use to vouch for what it made: sign it, require a signature, make a model the champion, all of it logged.

The rest of a stage's tools is tasks/workbench.py; whose signature counts is tasks/registry/signatures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.artifacts import Artifact, Model
from tasks.lifecycle import code_version
from tasks.lineage import words
from tasks.registry import signatures
from tasks.registry.audit import audited
from tasks.registry.refs import move_ref
from tasks.workbench import at_work, stored


@contextmanager
def logged(action: str, **details: Any) -> Iterator[None]:
    """Make a change inside that the audit log tells of before; see `audited`."""
    run = (at_work().lifecycle.flow_run or {}).get("id")
    with audited(at_work().lifecycle.store, action, **details, **({"flow_run": run} if run else {})):
        yield


def crown(model: Model, *, reason: str) -> None:
    """Make a model the champion: the ref moves with an audit entry, and MLflow's registry is told.

    Raises IntegrityError for a model whose signature does not count: nothing is registered then.
    """
    work = at_work()
    require_signed(model)
    inputs = stored(model).provenance.inputs
    before = move_ref(work.lifecycle.store, f"{model.name}/champion", model.ref, inputs=inputs, reason=reason)
    scores = work.lifecycle.outcomes["evaluate"].metrics if "evaluate" in work.lifecycle.outcomes else {}
    facts = {
        "Model": model.ref,
        "Bits per byte": f"{scores['bits_per_byte']:.4f}" if "bits_per_byte" in scores else "",
        "Dataset": str(work.lifecycle.results.get("dataset", "")),
        "Code": code_version()[0] or "",
        "Configuration": work.lifecycle.config_digest,
    }
    work.lifecycle.need_spool().register(
        work.lifecycle.run or work.run,
        name=model.name,
        uri=work.lifecycle.store.uri_of(stored(model)),
        alias="champion",
        tags=words.version_tags(facts),
        note=words.version_note(facts, before if before and before != model.ref else ""),
        about=words.MODEL_NOTE,
    )


def require_signer(kind: type[Artifact], name: str) -> None:
    """Raise IntegrityError or Missing unless what is about to be made can be signed: before the work, not after it."""
    signatures.require_signer(at_work().lifecycle.home, kind.KIND, name)


def sign(artifact: Artifact) -> None:
    """Sign what was just published with the home's key. Raises IntegrityError when the trust policy does not let it."""
    work = at_work()
    signatures.sign(work.lifecycle.store, work.lifecycle.home, stored(artifact))


def require_signed(artifact: Artifact) -> None:
    """Raise IntegrityError unless somebody trusted signed this artifact as it is, and stands by it."""
    work = at_work()
    signatures.require_signed(work.lifecycle.store, work.lifecycle.home, stored(artifact))
