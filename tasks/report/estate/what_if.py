"""What left the templates: the JSON of `az deployment sub what-if --no-pretty-print`, without the noise that Microsoft documents.

https://learn.microsoft.com/azure/azure-resource-manager/templates/deploy-what-if has the types of changes, and says what is
noise: properties that are reported as deleted where Azure set a default itself, and those whose value the operation cannot
compute. A type of change that is not documented, or that leaves open whether anything differs, is never taken for "no drift".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

UNRESOLVED = ("[", "*")
"""How a value begins that what-if could not compute, or does not show."""
Kind = Literal["gone", "changed", "to be deleted", "unclear"]


@dataclass(frozen=True)
class Change:
    """A resource that is not as it was rendered, or of which that is not known."""

    resource: str
    kind: Kind
    what: tuple[str, ...] = ()
    """Properties, or why it is unclear."""


@dataclass
class WhatIf:
    """What an answer comes to."""

    changes: list[Change] = field(default_factory=list)
    as_rendered: int = 0
    noise: int = 0
    """Properties that were passed over."""

    @property
    def left(self) -> list[Change]:
        return [one for one in self.changes if one.kind != "unclear"]

    @property
    def verdict(self) -> Literal["drifted", "unknown", "as rendered"]:
        return "drifted" if self.left else "unknown" if self.changes else "as rendered"

    @property
    def digest(self) -> str:
        """The same for the same drift."""
        changes = sorted((one.resource.lower(), one.kind, one.what) for one in self.left)
        return hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """For machines."""
        changes = [{"resource": one.resource, "kind": one.kind, "what": list(one.what)} for one in self.changes]
        return {"verdict": self.verdict, "as_rendered": self.as_rendered, "noise": self.noise, "changes": changes}


def read_what_if(path: Path) -> WhatIf:
    """What a file shows. Raises ValueError for what is no answer of what-if, or for one that failed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no file {path}; `az deployment sub what-if --no-pretty-print` prints one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or was cut off: {error}; ask again with --no-pretty-print") from error
    body = value.get("properties", value) if isinstance(value, dict) else {}
    if not isinstance(body, dict) or not isinstance(body.get("changes"), list):
        raise ValueError(f"{path} has no list of changes; `az deployment sub what-if --no-pretty-print` prints one")
    status = str(value.get("status", "Succeeded"))
    if status.lower() != "succeeded" or value.get("error"):
        raise ValueError(f"{path}: what-if ended as {status}: {json.dumps(value.get('error'))}; ask again")
    result = WhatIf()
    for change in body["changes"]:
        _take(change, result)
    for change in body.get("potentialChanges") or ():
        result.changes.append(Change(_id(change), "unclear", ("it may change, what-if says",)))
    for one in body.get("diagnostics") or ():
        words = f"{one.get('code')}: {one.get('message')}"
        result.changes.append(Change(str(one.get("target") or "the deployment"), "unclear", (words,)))
    return result


def _take(change: Any, result: WhatIf) -> None:
    kind = change.get("changeType") if isinstance(change, dict) else None
    match kind:
        case "NoChange":
            result.as_rendered += 1
        # There, and not rendered; of a nested deployment it means that what-if did not look inside.
        case "Ignore" if "/providers/microsoft.resources/deployments/" not in _id(change).lower():
            pass
        case "Create":
            result.changes.append(Change(_id(change), "gone"))
        case "Delete":
            result.changes.append(Change(_id(change), "to be deleted"))
        case "Modify" if isinstance(change.get("delta"), list) and change["delta"]:
            _modified(change, result)
        case _:
            reason = change.get("unsupportedReason") if isinstance(change, dict) else None
            why = f"changeType {kind}" + (f": {reason}" if reason else "")
            result.changes.append(Change(_id(change), "unclear", (why,)))


def _modified(change: Mapping[str, Any], result: WhatIf) -> None:
    paths: list[str] = []
    unclear: list[str] = []
    for delta in change["delta"]:
        for path, how in _leaves(delta):
            result.noise += how == "noise"
            (paths if how == "differs" else unclear if how == "unclear" else []).append(path)
    if paths:
        result.changes.append(Change(_id(change), "changed", tuple(paths)))
    elif unclear:
        result.changes.append(Change(_id(change), "unclear", tuple(unclear)))
    else:
        result.as_rendered += 1


def _leaves(delta: Mapping[str, Any], above: str = "", *, in_array: bool = False) -> Iterator[tuple[str, str]]:
    """Paths of the properties of a change, each with whether it differs, is noise, or is unclear."""
    path = ".".join(filter(None, [above, str(delta.get("path", ""))]))
    kind, children = delta.get("propertyChangeType"), delta.get("children")
    if kind not in ("Create", "Delete", "Modify", "Array", "NoEffect"):
        yield f"{path} (propertyChangeType {kind})", "unclear"
    elif kind != "NoEffect" and children:
        for child in children:
            yield from _leaves(child, path, in_array=kind == "Array")
    else:
        before, after = delta.get("before"), delta.get("after")
        default = kind == "Delete" and not in_array and path.split(".")[0] not in ("tags", "identity")
        computed = isinstance(after, str) and after.startswith(UNRESOLVED)
        spelt = kind == "Modify" and _plain(before) == _plain(after)
        yield path, "noise" if kind == "NoEffect" or default or computed or spelt else "differs"


def _plain(value: Any) -> Any:
    """Case and spaces of a text do not count: westeurope is West Europe."""
    return value.lower().replace(" ", "") if isinstance(value, str) else value


def _id(change: Any) -> str:
    if not isinstance(change, dict):
        return str(change)
    return str(change.get("resourceId") or change.get("identifiers") or "a resource without an id")
