"""`headway models`, `promote` and `model push`: the versions of models by their names of now, the move of the champion's, and a
version's way to the Hugging Face hub.

Going back is `headway rollback` (history.py). What endpoints serve is moved by neither. See docs/history.md.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, HistoryReason, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import in_home, say, short_ref
from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.config.base import experiment, tracking_uri
from tasks.lineage import messages
from tasks.lineage.spool import Spool
from tasks.registry.logged_model import evaluation_of, offered
from tasks.registry.refs import aliases
from tasks.storage import open_store
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store


def tell(store: Store, action: str, reason: str, model: Manifest) -> None:
    """Tell MLflow's registry, by a spool as of all news, that a model is the champion, and what is `previous` by that.

    `action` is rollback or promote.
    """
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
        model=offered(store, home(), model, spool.folder / "models" / model.version, measuring={}),
    )
    spool.end_run(run, "FINISHED", tags={})
    spool.close()


FIRST = ("bits_per_byte", "perplexity", "gain_over_bigram", "tokens_per_second_onnx")
"""Metrics that people are shown, the first ones that there are; --json has all."""
MOST_SHOWN = 3


def models(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The name of a model; by default all.")] = "",
    as_json: Json = False,
) -> None:
    """List the versions of models, newest first: champion, challenger or previous, metrics, and what endpoints serve them."""
    store = open_store(home())
    bare = parse_ref(name, kind="model")[1] if name else ""
    results = list(store.manifests("model", bare) if bare else store.manifests("model"))
    if bare and not results:
        raise Unknown(f"there is no model/{bare} in {store.uri}", remedy="`headway models` lists what there is.")
    from tasks.serving.known import endpoint_of, known_endpoints

    served: dict[str, list[str]] = {}  # the endpoints that serve a model now, by its reference
    for endpoint in known_endpoints(home()):
        now = endpoint_of(home(), endpoint).serves_from()
        if now and now.running:
            served.setdefault(now.model_ref, []).append(endpoint)
    names = {manifest.provenance.name: None for manifest in results}
    known: dict[str, dict[str, list[str]]] = {}  # the aliases of each model's versions, by reference
    for each in names:
        known[each] = {}
        for alias, ref in aliases(store, each).items():
            known[each].setdefault(ref, []).append(alias)
    rows: list[dict[str, Any]] = []
    for model in results:
        evaluation = evaluation_of(store, model)
        evaluated = dict(evaluation.provenance.metrics) if evaluation else {}
        row = {
            "ref": model.ref,
            "created": model.provenance.created,
            "aliases": known[model.provenance.name].get(model.ref, []),
            "endpoints": served.get(model.ref, []),
            "metrics": {**model.provenance.metrics, **evaluated},
            "evaluation": evaluation.ref if evaluation else "",
            "evaluated": evaluated,
            "bytes": model.bytes,
        }
        rows.append(row)
    rows.sort(key=lambda row: row["created"], reverse=True)
    say(
        {"models": rows},
        list(map(_row_in_words, rows)) or in_home("No model yet", "`headway retrain` makes one."),
        as_json=as_json,
    )


def promote(
    ref: Annotated[str, typer.Argument(help="model/NAME@VERSION; without a version, the current one.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and do nothing.")] = False,
    reason: HistoryReason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make a version the champion of its model, if every byte verifies and a trusted key signed it. Needs --reason."""
    from tasks.registry import promoting
    from tasks.serving.known import accept_again

    store = open_store(home())
    made = promoting.would_promote(store, ref)
    accepted: list[str] = []
    if not dry_run:
        if not reason.strip():
            raise ValueError(f"say why: --reason TEXT goes into the audit log with the promotion of {made.model.ref}")
        with asked("promote", as_, what=f"promote {made.model.ref}", reason=reason):
            when_champion = partial(tell, store, "promote", reason)
            made = promoting.promote(
                store, made.model.ref, keys=home() / "keys", reason=reason, when_champion=when_champion
            )
        accepted = accept_again(home(), made.model.ref)
    fields = {"ref": made.model.ref, "before": made.before, "changed": made.changed and not dry_run, "dry_run": dry_run}
    new, old = short_ref(made.model.ref), short_ref(made.before or "none")
    words = f"{new} is the champion already{'' if accepted else ': nothing to do'}"
    if made.before != made.model.ref:
        words = f"{new} {'would become' if dry_run else 'is'} the champion; before: {old}"
        words += "\nWhat endpoints serve stays as it is."
    if accepted:
        words += f"\n{', '.join(accepted)} may serve it again."
    say(fields, words, as_json=as_json)


def push(
    ref: Annotated[str, typer.Argument(help="model/NAME[@VERSION], or checkpoint/NAME[@VERSION].")],
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="hf://ORG/NAME, or hf://ORG/NAME@BRANCH to commit on top of a branch that is there."
        ),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; without this it is private.")
    ] = False,
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Push a model to the Hugging Face hub, if every byte verifies and a trusted key signed it.

    The repository is made when it is not there. The commit holds the files of the artifact and its card, and nothing else.
    What the branch holds already is not sent again. HF_TOKEN must be a token that may write.
    """
    from deployments.publishing.hugging_face import Hub
    from deployments.publishing.pushing import push as push_model

    with asked("publish", as_, what=f"push {ref} to {address}", reason=reason):
        pushed = push_model(open_store(home()), home(), ref, address, Hub(), public=public, reason=reason)
    manifest = pushed.manifest
    fields = {
        "ref": manifest.ref,
        "to": pushed.uri,
        "page": pushed.page,
        "moved": pushed.moved,
        "created": pushed.created,
        "public": public and pushed.created,
        "files": len(manifest.content.files),
        "bytes": manifest.bytes,
        "deleted": list(pushed.deleted),
    }
    words = f"{short_ref(manifest.ref)} is {pushed.uri} already; nothing was sent"
    if pushed.moved:
        made = f", a new {'public' if public else 'private'} repository" if pushed.created else ""
        words = f"{short_ref(manifest.ref)}: {fields['files']} file(s), {manifest.bytes} bytes, as {pushed.uri}{made}"
        words += f"\n{pushed.page}"
        if pushed.deleted:
            words += (
                f"\n{len(pushed.deleted)} file(s) of the commit before are not in it, for example {pushed.deleted[0]}"
            )
    say(fields, words, as_json=as_json)


def _row_in_words(row: dict[str, Any]) -> str:
    names = ", ".join([*row["aliases"], *(f"endpoint/{name}" for name in row["endpoints"])])
    by: dict[str, list[str]] = {}  # the first metrics, each with who measured it
    for name in [name for name in FIRST if name in row["metrics"]][:MOST_SHOWN]:
        who = short_ref(row["evaluation"]) if name in row["evaluated"] else "its export"
        by.setdefault(who, []).append(f"{name} {row['metrics'][name]:.4g}")
    measured = "; ".join(f"{', '.join(shown)} by {who}" for who, shown in by.items())
    return f"{short_ref(row['ref']):<40}{row['created'][:19]:<21}{names:<36}{measured}".rstrip()
