"""`headway lineage`: what something was made from, and what was made from it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.output import say

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def lineage(
    ref: Annotated[str, typer.Argument(help="KIND/NAME[@VERSION] of an artifact, or endpoint/NAME.")] = "",
    sync: Annotated[bool, typer.Option("--sync", help="Tell MLflow what it missed while it was away.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an artifact, model or endpoint was made from, down to the raw data, code commit and configuration."""
    if sync:
        return _sync(as_json)
    if not ref:
        raise ValueError("name what to look at, for example: headway lineage endpoint/local; or --sync")
    from tasks.endpoints.known import served_model
    from tasks.registry.ancestry import walk
    from tasks.settings import home
    from tasks.storage import open_store

    serves = served_model(home(), ref.partition("/")[2]) if ref.startswith("endpoint/") else None
    found = walk(open_store(home()), ref, serves=serves)
    say(found, "\n".join(_tree(found, found["root"], "")), as_json=as_json)
    return None


def _tree(found: dict[str, Any], ref: str, indent: str) -> list[str]:
    """The lineage as an indented list; what was shown before is not unfolded again."""
    nodes = {node["ref"]: node for node in found["nodes"]}
    shown: set[str] = set()

    def unfold(at: str, depth: str) -> list[str]:
        node = nodes[at]
        commit = f"  commit {node['commit'][:10]}{' (changed)' if node['dirty'] else ''}" if node["commit"] else ""
        config = f"  config {node['config_digest'][:10]}" if node["config_digest"] else ""
        line = f"{depth}{at.partition('@')[0]}@{(node['version'] or '')[:12]}".rstrip("@")
        if at in shown:
            return [f"{line}  (above)"]
        shown.add(at)
        below = [edge["input"] for edge in found["edges"] if edge["output"] == at]
        return [f"{line}{commit}{config}  {node['created'] or ''}".rstrip()] + [
            text for ref in below for text in unfold(ref, depth + "  ")
        ]

    return unfold(ref, indent)


def _sync(as_json: bool) -> None:
    """Publish every spool that MLflow does not know whole, and wait for it."""
    from tasks.lineage.spool import refused, sync
    from tasks.settings import home

    behind, aside = sync(home()), refused(home())
    words = ["MLflow knows everything." if not behind else f"{len(behind)} run(s) could not be told; is the server up?"]
    words += [
        f"MLflow refused {count} event(s) for good; {path} holds them and says why." for path, count in aside.items()
    ]
    fields = {"synced": not behind, "behind": [str(folder) for folder in behind]}
    say({**fields, "refused": {str(path): count for path, count in aside.items()}}, "\n".join(words), as_json=as_json)
