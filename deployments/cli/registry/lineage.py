"""`headway lineage`: what something was made from, and what was made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import say, short_ref
from tasks.common.home import home
from tasks.config.base import openlineage_key
from tasks.config.environment import code_place
from tasks.lineage import spool
from tasks.registry.ancestry import PLACE, walk
from tasks.registry.records import load
from tasks.storage import open_store

LINES_SHOWN = 200
"""Of the tree: nobody reads ten thousand."""
DEEPEST = 24
"""Steps by which the tree is indented at most: a model may be trained on for years."""
THROUGH = {"data": "made from it", "verdict": "judged or measured under it"}


def lineage(
    ref: Annotated[str, typer.Argument(help="KIND/NAME[@VERSION] of an artifact, or endpoint/NAME.")] = "",
    forward: Annotated[
        bool, typer.Option("--forward", help="Show the reverse: which models and endpoints were made from it.")
    ] = False,
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write it as an HTML page.")] = "",
    openlineage: Annotated[
        str, typer.Option("--openlineage", metavar="FILE|URL", help="Send it as OpenLineage events.")
    ] = "",
    sync: Annotated[bool, typer.Option("--sync", help="Publish what MLflow missed while it was down.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an artifact, model or endpoint was made from, down to the raw data, code commit and configuration."""
    if sync:
        return _sync(as_json)
    if not ref:
        raise ValueError("name what to look at, for example: headway lineage endpoint/local; or --sync")
    from tasks.serving.known import known_endpoints, served_model

    serves = served_model(home(), ref.partition("/")[2]) if ref.startswith("endpoint/") else None
    serving = {name: served_model(home(), name) for name in known_endpoints(home())} if forward else {}
    result = walk(
        open_store(home()),
        ref,
        direction="up" if forward else "down",
        serves=serves,
        serving=serving,
        index=home() / PLACE,
    )
    refs = result["damaged"]
    text = "The manifest of {} cannot be read, so what it was made from is not known: headway verify says more."
    lines = [
        *(_answer(result) if forward else []),
        *_tree(result),
        *([text.format(", ".join(map(short_ref, refs[:5])) + (" ..." if len(refs) > 5 else ""))] if refs else []),
    ]
    if html:
        path = Path(html)
        from tasks.report.lineage import write_lineage_page

        result["html"] = str(write_lineage_page(path, result).absolute())
        lines = [result["html"]]
    if openlineage:
        from tasks.lineage.openlineage import events_of, hand_on

        store = open_store(home())
        runs = {(node["stage"], node["key"]) for node in result["nodes"] if node["stage"] and node["key"]}
        seconds = {run: record.seconds for run in runs if (record := load(store, *run))}
        events = events_of(result, store=store.uri, seconds=seconds, code=code_place())
        hand_on(events, openlineage, key=openlineage_key())
        result["events"] = len(events)
        lines = [*(lines if html else []), f"{result['events']} events for {openlineage}"]
    if forward:
        # Each configuration once, by its digest: thousands of artifacts may be made with one.
        configs = {node["config_digest"]: node["config"] for node in result["nodes"] if node["config_digest"]}
        nodes = [{**node, "config": None} if node["config_digest"] else node for node in result["nodes"]]
        result = {**result, "nodes": nodes, "configurations": configs}
    say(result, lines, as_json=as_json)
    return None


def _answer(result: dict[str, Any]) -> list[str]:
    """What was made from it, endpoints first: when it is poisoned, they are what has to stop."""
    stand = [*result["endpoints"], *result["models"]]
    if not stand:
        return [f"No model and no endpoint stands on {short_ref(result['root'])}.", ""]
    serving = {edge["output"]: edge["input"] for edge in result["edges"] if edge["how"] == "serves"}
    heads = [f"{len(result['endpoints'])} endpoint(s) and {len(result['models'])} model(s) stand on {result['root']}:"]
    for each in stand[:LINES_SHOWN]:
        served = f"  serves {short_ref(serving[each['ref']])}" if each["ref"] in serving else ""
        heads.append(
            f"  {short_ref(each['ref']):<50}{THROUGH[each['through']]}{served}  {each['created'] or ''}".rstrip()
        )
    return [*heads, *_more(len(stand)), ""]


def _tree(result: dict[str, Any]) -> list[str]:
    """The lineage as an indented list; what was shown before is not unfolded again."""
    nodes = {node["ref"]: node for node in result["nodes"]}
    near, far = ("output", "input") if result["direction"] == "down" else ("input", "output")
    ahead: dict[str, list[str]] = {}
    for edge in result["edges"]:
        ahead.setdefault(edge[near], []).append(edge[far])
    lines: list[str] = []
    shown: set[str] = set()
    left = [(result["root"], 0)]
    while left and len(lines) < LINES_SHOWN:
        at, depth = left.pop()
        node = nodes[at]
        short = short_ref(node["ref"])
        if at in shown:
            line = f"{short}  (above)"
        else:
            commit = f"  commit {node['commit'][:10]}{' (changed)' if node['dirty'] else ''}" if node["commit"] else ""
            config = f"  config {node['config_digest'][:10]}" if node["config_digest"] else ""
            line = f"{short}{commit}{config}  {node['created'] or ''}".rstrip()
        lines.append(f"{'  ' * min(depth, DEEPEST)}{line}")
        if at not in shown:
            shown.add(at)
            left += [(each, depth + 1) for each in reversed(ahead.get(at, []))]
    return [*lines, *_more(len(nodes), len(shown))] if left else lines


def _more(count: int, shown: int = LINES_SHOWN) -> list[str]:
    return [f"... {count - shown} more; --json lists all"] if count > shown else []


def _sync(as_json: bool) -> None:
    """Publish every spool that MLflow does not know whole, and wait for it."""
    behind, aside = spool.sync(home()), spool.refused(home())
    unpublished = f"{len(behind)} run(s) could not be published; is the server up?"
    words = [unpublished if behind else "MLflow is up to date."]
    for path, count in aside.items():
        words.append(f"MLflow refused {count} event(s) for good; {path} holds them and says why.")
    fields: dict[str, Any] = {"synced": not behind, "behind": [str(folder) for folder in behind]}
    fields["refused"] = {str(path): count for path, count in aside.items()}
    say(fields, "\n".join(words), as_json=as_json)
