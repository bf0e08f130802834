"""Of a qualification's page: which machines are used, which are left out, and what was done about them, or can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.report.markup import Html, folded, join, tag
from tasks.report.qualification.data import Found, by_number, count

NAMES_SHOWN = 24


def acts(found: Found) -> Html:
    """Sentences, and the requests that nobody has sent yet; nothing where nothing is known of it."""
    told = tag("ul", *(tag("li", one) for one in sentences(found)))
    asked = tag("ul", *(tag("li", *_request(one)) for one in found.requests), class_="requests")
    said = f"{count(len(found.requests), 'request')} to Azure that somebody may send; Headway sends none"
    return join(tag("h3", "What follows"), told, folded(said, asked)) if told or asked else Html()


def sentences(found: Found) -> list[str]:
    """What was done with the machines."""
    told = []
    if found.usable and found.open:
        told.append(f"Jobs run on {count(len(found.usable), 'machine')}: {named(found.usable)}.")
    if found.excluded:
        told.append(f"Left out of the jobs to come: {named(found.excluded)}.")
    if done := [node for node, done, _ in found.drained if done]:
        told.append(f"Drained, until headway qualify --resume puts them back: {named(done)}.")
    told += [f"{node} was not drained: {said}." for node, done, said in found.drained if not done]
    return told


def named(names: tuple[str, ...] | list[str] | Mapping[str, str]) -> str:
    """The first of them, and how many more."""
    known = sorted(names, key=by_number)
    more = f" and {len(known) - NAMES_SHOWN:,} more" if len(known) > NAMES_SHOWN else ""
    return ", ".join(known[:NAMES_SHOWN]) + more


def _request(one: Mapping[str, Any]) -> tuple[Html, ...]:
    body = one.get("body")
    return (
        tag("strong", f"{one.get('node', '')}: {one.get('what', '')} "),
        tag("code", f"{one.get('method', '')} {one.get('url', '')}"),
        tag("pre", json.dumps(body, indent=1)) if body else Html(),
    )
