"""Exports of an Azure subscription: the commands that make them, and what they show. Reads files; asks nobody.

What Azure answers lies in an envelope that says which query it was: `{"query": NAME, "of": ID, "answer": ...}`. Only so an empty
answer, or one that lacks a resource, shows that something is absent. A file without an envelope counts as the query that it is
called after (`resources.json`, `resources-2.json`); under any other name only what is in it counts.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

QUERIES = Path(__file__).with_name("queries.yaml")
COLLECT = Path(__file__).with_name("collect.sh")
"""The functions that the script begins with."""
OLDEST = "2022"
"""An answer of an API version before this year may lack properties that exist: what it does not have is not known."""
ID = re.compile(r"/subscriptions/([0-9a-f-]{36})(?:/|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Resource:
    """A row of an export."""

    id: str
    type: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.body.get("name") or self.id.rpartition("/")[2])

    @property
    def group(self) -> str:
        match = re.search(r"/resourcegroups/([^/]+)", self.id, re.IGNORECASE)
        return match[1] if match else ""

    @property
    def parent(self) -> str:
        """The id of what it belongs to: of an extension its scope, else without its own type and name."""
        scope, between, _ = self.id.lower().rpartition("/providers/")
        own = self.id.lower()[len(scope + between) :].split("/")
        return scope if len(own) <= 3 else scope + between + "/".join(own[:-2])

    @property
    def old(self) -> bool:
        version = self.body.get("apiVersion")
        return isinstance(version, str) and version[:4] < OLDEST


@dataclass
class Export:
    """All that the files show."""

    subscriptions: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    """Queries whose answer is whole."""
    of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By query, ids of resources that it was asked of, and answered whole."""
    notes: list[str] = field(default_factory=list)
    """What is incomplete, for people."""
    _types: dict[str, dict[str, Resource]] = field(default_factory=lambda: defaultdict(dict))
    _pages: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def having(self, types: Iterable[str]) -> Iterator[Resource]:
        """Resources of the types."""
        for type_ in types:
            yield from self._types.get(type_.lower(), {}).values()

    def add(self, row: Mapping[str, Any]) -> None:
        id_ = "/" + str(row["id"]).lstrip("/")
        type_ = str(row.get("type") or type_of(id_))
        self.subscriptions |= {one.lower() for one in ID.findall(id_)[:1]}
        self._types[type_.lower()][id_.lower()] = Resource(id_, type_.lower(), row)

    def page(self, query: str, answer: Mapping[str, Any]) -> None:
        self._pages[query].append(answer)

    def settle(self) -> None:
        """Which Resource Graph queries are whole: the last page may be among other files than the first."""
        for query, pages in self._pages.items():
            total = max(int(_first(page, "total_records", "totalRecords") or 0) for page in pages)
            ids = {json.dumps(row, sort_keys=True) for page in pages for row in page["data"]}
            open_ = all(_first(page, "skip_token", "skipToken", "$skipToken") for page in pages)
            cut = any(str(page.get("resultTruncated", "")).lower() == "true" for page in pages) and len(ids) < total
            if len(ids) < total or open_ or cut:
                self.notes.append(
                    f"{query}: a page only, {len(ids):,} of {total or 'an unknown number of'} rows; follow its skip_token "
                    "(`headway estate audit --collect` does)"
                )
            else:
                self.complete.add(query)
        if "resources" in self.complete:  # then it is known of which resources the others had to be asked
            for name, asked in queries().items():
                wanted = {one.id.lower() for one in self.having(asked.get("of", ()))}
                if asked.get("of") and wanted <= self.of[name]:
                    self.complete.add(name)


@functools.cache
def queries() -> dict[str, dict[str, Any]]:
    """The queries by name."""
    result: dict[str, dict[str, Any]] = yaml.safe_load(QUERIES.read_text(encoding="utf-8"))
    return result


def script() -> str:
    """A Bash script that asks all of them, read-only, and writes an export."""
    lines = []
    for name, query in queries().items():
        if "graph" in query:
            lines.append(f'graph {name} "{" ".join(query["graph"].split())}"')
        elif query["of"]:
            lines += [f"of {type_} | rest {name} '{query['rest']}'" for type_ in query["of"]]
        else:
            lines.append(f"echo \"/subscriptions/$subscription\" | rest {name} '{query['rest']}'")
    lines.append('echo "then: headway estate audit estate-export"')
    return COLLECT.read_text(encoding="utf-8") + "\n".join(lines) + "\n"


def read_exports(paths: Iterable[Path], *, subscription: str = "") -> Export:
    """What the files show; a folder stands for its JSON files. Raises ValueError for what is no export."""
    result = Export()
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no JSON files; `headway estate audit --collect` prints what writes them")
        for file in files:
            _read(file, result)
    result.settle()
    wanted = {subscription.lower()} if subscription else result.subscriptions
    if other := result.subscriptions - wanted:
        raise ValueError(
            f"the export is of the subscription {', '.join(sorted(other))}, and the settings name {subscription}: "
            "choose it with `az account set --subscription`, and collect again"
        )
    if len(result.subscriptions) > 1:
        raise ValueError(
            f"the exports are of several subscriptions ({', '.join(sorted(result.subscriptions))}): audit one at a time"
        )
    return result


def _read(path: Path, result: Export) -> None:
    """Add what a file shows."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}; `headway estate audit --collect` prints what writes one") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or was cut off: {error}; collect it again") from error
    query, of, answer = _opened(path, value)
    result.subscriptions |= {one.lower() for one in ID.findall(of)[:1]}
    if answer is None:
        result.notes.append(f"{path.name}: Azure did not answer {query}" + (f" of {of}" if of else ""))
        return
    for row in _rows(path, answer):
        result.add(row)
    if not query:
        return
    # What the answer is whole for.
    if isinstance(answer, dict) and "data" in answer:
        result.page(query, answer)
    elif isinstance(answer, dict) and _first(answer, "nextLink", "next_link"):
        result.notes.append(f"{path.name}: a page only, its nextLink was not followed")
    elif "graph" in queries()[query] or (of and ID.fullmatch(of)):
        result.complete.add(query)
    elif of:
        result.of[query].add(of.lower())
    else:
        words = f"it does not say which resource {query} was asked of, so what it lacks is not known"
        result.notes.append(f"{path.name}: {words}")


def _opened(path: Path, value: Any) -> tuple[str, str, Any]:
    """Which query a file answers, of which resource, and the answer."""
    if isinstance(value, dict) and {"query", "answer"} <= set(value):
        query = str(value["query"])
        if query not in queries():
            raise ValueError(
                f"{path} answers the query {query!r}, which is none of {', '.join(queries())}; collect it again"
            )
        return query, str(value.get("of") or ""), value["answer"]
    stem = re.sub(r"-\d+$", "", path.stem)
    return (stem if stem in queries() else ""), "", value


def _rows(path: Path, answer: Any) -> list[dict[str, Any]]:
    rows = answer
    if isinstance(answer, dict):
        rows = next((answer[key] for key in ("data", "value") if key in answer), [answer])
    if isinstance(rows, dict) and "columns" in rows:
        raise ValueError(
            f"{path} is a table of Resource Graph: ask for rows that are objects (resultFormat objectArray)"
        )
    if not isinstance(rows, list):
        raise ValueError(f"{path} is no export of Azure: rows are wanted, and there is a {type(rows).__name__}")
    for row in rows:
        if not isinstance(row, dict) or not re.match(
            r"/|subscriptions/", str(row.get("id"))
        ):  # a budget's has no slash
            raise ValueError(
                f"{path} is no export of Azure: a row has no id; `headway estate audit --collect` asks for it"
            )
    return rows


def type_of(id_: str) -> str:
    """The type of a resource by its id."""
    _, _, own = id_.rpartition("/providers/")
    provider, *parts = own.split("/")
    return "/".join([provider, *parts[::2]])


def _first(value: Mapping[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name)), None)
