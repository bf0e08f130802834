"""What MLflow is given of a model beside its name: signature, key, addresses, and what was measured of it.

Small files: the weights stay in the store, unless HEADWAY_MLFLOW_WEIGHTS says otherwise. What MLflow's users load is made of them
by the publisher (tasks/lineage/model_folder.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.config.base import copies_weights
from tasks.security.trust import trusted_key
from tasks.signing.bundle import SIGNATURE
from tasks.signing.keys import pem_of
from tasks.signing.statement import STATEMENT, claimed_statement
from tasks.storage.manifest import Manifest
from tasks.storage.signed import LINEAGE, served_files
from tasks.storage.store import Store

EVALUATION = "evaluation/"
log = logging.getLogger("headway.lineage")


def logged_model(
    store: Store, home: Path, model: Manifest, folder: Path, *, measuring: Mapping[str, str]
) -> dict[str, Any]:
    """Lay down in a folder of a spool what is handed on of a signed model; returns what `Spool.register` takes as `model`.

    `measuring` has the spool's identities of the runs that measured it, by stage. Raises IntegrityError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    provenance = model.provenance.model_dump(mode="json", include={"name", *LINEAGE})
    content = model.content.model_dump(mode="json")
    (folder / "manifest.json").write_text(json.dumps({"content": content, "provenance": provenance}), encoding="utf-8")
    envelope = store.attachment(model, STATEMENT) or b""
    (folder / STATEMENT).write_bytes(envelope)
    (folder / SIGNATURE).write_bytes(store.attachment(model, SIGNATURE) or b"")
    key = trusted_key(home, claimed_statement(envelope).key, f"model/{model.provenance.name}")
    (folder / "key.pub").write_bytes(pem_of(key))
    weights = str(store.fetch(model)) if copies_weights() else ""
    places = {} if weights else {file.path: store.location(model, file) for file in served_files(model)}
    (folder / "places.json").write_text(json.dumps(places), encoding="utf-8")
    evaluation = evaluation_of(store, model)
    measured: list[dict[str, Any]] = [{"run": measuring.get("export", ""), "metrics": model.provenance.metrics}]
    if evaluation:
        text = next((parse_ref(ref) for ref in evaluation.provenance.inputs if ref.startswith("tokens/")), None)
        on = {"dataset": {"name": text[1], "digest": text[2]}} if text else {}
        measured.append({"run": measuring.get("evaluate", ""), "metrics": evaluation.provenance.metrics, **on})
    return {"path": str(folder), "weights": weights, "measured": measured}


def offered(
    store: Store, home: Path, model: Manifest, folder: Path, *, measuring: Mapping[str, str]
) -> dict[str, Any] | None:
    """Lay the model down as `logged_model` does, or return None where that fails.

    The champion has moved by then: a store that does not answer, or an evaluation that cannot be read, must not fail that.
    """
    try:
        return logged_model(store, home, model, folder, measuring=measuring)
    except (HeadwayError, OSError, ValueError) as error:
        log.warning("MLflow is given no model to load of %s, only its place: %s", model.ref, error)
        return None


def evaluation_of(store: Store, model: Manifest) -> Manifest | None:
    """The evaluation under which a model was exported; None where that is gone. The export measures less text than it."""
    under = next((ref for ref in model.provenance.context if ref.startswith(EVALUATION)), "")
    try:
        return store.manifest(*parse_ref(under)) if under else None
    except HeadwayError:
        return None
