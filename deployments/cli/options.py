"""The options that many commands share, and what a flow is called with by them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tasks.common.redaction import require_no_secrets

Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        help="A YAML file, or the name of a shipped configuration; of several the later wins. Default: local.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given often.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def parameters_of(flow: str, config: list[str] | None, dataset: str, set_: list[str] | None) -> dict[str, Any]:
    """What a flow is called with, by the options of a command. Raises ValueError, also for a secret among them."""
    from deployments.catalogue.flows import parameters

    payload = parameters(flow, config or "local", dataset, tuple(set_ or ()))
    require_no_secrets(payload)
    return payload
