"""Telling MLflow's registry who is champion after a command moved it, by the way of all news: a spool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.storage.manifest import Manifest
    from tasks.storage.store import Store


def tell(store: Store, action: str, reason: str, model: Manifest) -> None:
    """Tell MLflow that a model is the champion, and what is `previous` by that. `action` is rollback or promote."""
    from tasks.common.home import home
    from tasks.config.base import experiment, tracking_uri
    from tasks.lineage import messages
    from tasks.lineage.spool import Spool
    from tasks.registry.refs import aliases

    name = model.provenance.name
    about = messages.experiment_note(action, name)
    spool = Spool(home(), tracking_uri(), experiment=experiment(messages.experiment_name(action, name)), note=about)
    tags = messages.version_tags({"Model": model.ref, "Code": model.provenance.commit or ""})
    note = {"headway.flow": action, "headway.model": name, "mlflow.note.content": reason}
    run = spool.start_run(messages.run_name(action, time.time()), tags={**tags, **note}, params={})
    previous = aliases(store, name).get("previous", "")
    spool.register(
        run,
        name=name,
        uri=store.uri_of(model),
        alias="champion",
        tags=tags,
        note=messages.version_note({"Model": model.ref}, ""),
        about=messages.MODEL_NOTE,
        previous=previous,
    )
    spool.end_run(run, "FINISHED", tags={})
    spool.close()
