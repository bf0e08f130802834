"""The options that many commands share, and what a flow is called with by them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasks.artifacts import parse_ref
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.storage import open_store
from tasks.storage.store import counts_as_newest, find

if TYPE_CHECKING:
    from tasks.config.cluster import ClusterConfig

Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        help="A YAML file, or the name of a shipped configuration (default: local); may be repeated: later ones take precedence.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


def parameters_of(flow: str, config: list[str] | None, dataset: str, set_: list[str] | None) -> dict[str, Any]:
    """What a flow is called with, by the options of a command. Raises ValueError, also for a secret among them."""
    from deployments.catalogue.flows import parameters

    payload = parameters(flow, config or "local", dataset, tuple(set_ or ()))
    require_no_secrets(payload)
    return payload


def look_at_gpus(cluster: ClusterConfig) -> None:
    """Warn when jobs leave GPUs of the VM size that is named idle. Raises ValueError when they ask for more than it has."""
    if not (cluster.size and cluster.gpus_per_node):
        return
    from tasks.benchmark import SAME_GPUS, gpu_mismatch, require_gpus

    require_gpus(cluster)
    if text := gpu_mismatch(cluster):
        print(f"headway: {text}: {SAME_GPUS}", file=sys.stderr)


def require_dataset(name: str, option: str) -> None:
    """Raise Unknown when the home has no such dataset; the remedy names those that exist, with `option`, which takes one."""
    store = open_store(home())
    try:
        find(store, *parse_ref(name, kind="dataset"))
    except Unknown as error:
        names = sorted({one.provenance.name for one in store.manifests("dataset") if counts_as_newest(one)})
        known = (
            f"Name one that exists: {', '.join(f'{option} {each}' for each in names)}."
            if names
            else "There is none yet."
        )
        raise Unknown(error.message, remedy=f"{known} To make one: headway dataset publish NAME PATH...") from error
