"""The chain under the audit log: numbered documents, each written once and naming the hash of the one before it.

`audit/NUMBER.json` are the truth. `heads/audit.json` says which is the newest, so that nobody has to list them; it is advice for
who appends, and for `check` the anchor without which entries could be cut off at the end. What an entry says is audit.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tasks.common.errors import IntegrityError
from tasks.storage.store import Document, Store

FOLDER = "audit"
HEAD = "heads/audit.json"
AT_ONCE = 16
"""Documents that are read at the same time: a Blob store answers each after some milliseconds."""
_NUMBERED = re.compile(rf"{FOLDER}/(\d{{8}})\.json")


@dataclass(frozen=True)
class Link:
    """An entry by its number and the sha256 of its bytes."""

    number: int
    hash: str

    @property
    def noted(self) -> dict[str, Any]:
        """How a change of history names the entry that says so too."""
        return {"entry": self.number, "entry_hash": self.hash}


@dataclass(frozen=True)
class Break:
    """The first place where the chain does not hold."""

    number: int
    """Of the entry that does not fit, or is not there."""
    problem: Literal["changed", "missing", "cut off", "foreign", "head", "forgotten"]
    words: str


@dataclass(frozen=True)
class Checked:
    """What a walk along the chain found."""

    entries: int
    head: Link
    broken: Break | None


NOTHING = Link(0, "")


def append(store: Store, entry: Mapping[str, Any]) -> Link:
    """Write an entry under the next number: three requests, unless somebody else writes at the same time.

    The head is believed: an entry that was changed since it was written does not become the one that the next one names.
    """
    head, etag = _head(store)
    last = head or _newest(store)
    while True:
        link = {"number": last.number + 1, "time": time.time(), "previous": last.hash or None}
        data = json.dumps({**entry, **link}, indent=1).encode()
        if store.create(_key(last.number + 1), data):
            break
        taken = store.read(_key(last.number + 1))
        last = Link(last.number + 1, hash_of(taken.data)) if taken else last
    made = Link(last.number + 1, hash_of(data))
    _advance(store, made, etag)
    return made


def newest(store: Store) -> Link:
    """The newest entry as the head has it; `NOTHING` for an empty log. One that is being written just now may be missing."""
    return _head(store)[0] or _newest(store)


def between(store: Store, after: int, to: int) -> Iterator[tuple[Link, bytes]]:
    """The entries with numbers above `after` up to `to`, in their order; what is not there is passed over."""
    for key, data in _documents(store, [_key(number) for number in range(after + 1, to + 1)]):
        if data is not None:
            yield Link(_number(key), hash_of(data)), data


def backwards(store: Store) -> Iterator[tuple[int, bytes]]:
    """All entries, newest first."""
    keys = [key for key in store.list(FOLDER) if _NUMBERED.fullmatch(key)]
    for key, data in _documents(store, keys[::-1]):
        if data is not None:
            yield _number(key), data


def linked(store: Store, link: Link) -> bytes | None:
    """An entry's bytes, if it is the one that was written, and stands in the chain: the next one, or the end, names it."""
    result = store.read(_key(link.number))
    if result is None or hash_of(result.data) != link.hash:
        return None
    after = store.read(_key(link.number + 1))
    if after is None:
        last = newest(store)  # behind while an entry is being written, or when its writer was killed
        return result.data if last.number < link.number or last == link else None
    return None if _between(link, link.number + 1, after.data) else result.data


def unchanged(store: Store, number: int) -> bool:
    """Whether an entry is what was written: the next one, or the end, names it as it is."""
    result = store.read(_key(number))
    return result is not None and linked(store, Link(number, hash_of(result.data))) is not None


def since(store: Store, link: Link) -> list[dict[str, Any]] | None:
    """What was written after an entry, oldest first; None where it does not hang together from that entry to the end."""
    head = newest(store)
    result, last = [], link
    for made, data in between(store, link.number, head.number + AT_ONCE):  # the head may be behind
        if _between(last, made.number, data):
            return None
        result.append(dict(json.loads(data)))
        last = made
    return result if last == head or last.number > head.number else None


def check(store: Store, *, contains: Sequence[str] = (), shipped: Link | None = None) -> Checked:
    """Walk the whole chain.

    `contains` are hashes that somebody wrote down, or how they begin; `shipped` is the newest entry of a copy elsewhere.
    """
    head, etag = _head(store)  # before the list: whoever appends meanwhile makes it longer, never shorter than the head
    keys = store.list(FOLDER)
    links: list[Link] = []
    odd = next((key for key in keys if not _NUMBERED.fullmatch(key)), None)
    broken = Break(0, "foreign", f"{odd} is no entry, and lies among them") if odd else None
    last: tuple[Link, bytes] = NOTHING, b""
    for key, data in _documents(store, [key for key in keys if _NUMBERED.fullmatch(key)]):
        if broken is None:
            broken = _between(last[0], _number(key), data or b"")
        last = Link(_number(key), hash_of(data or b"")), data or b""
        links.append(last[0])
    if broken is None:
        broken = _end(last, head, has_head=etag is not None) or _anchored(links, contains, head, shipped)
    return Checked(len(links), last[0], broken)


def hash_of(data: bytes) -> str:
    """What the next entry names of this one."""
    return hashlib.sha256(data).hexdigest()


def _between(last: Link, number: int, data: bytes) -> Break | None:
    """What is wrong between an entry and the next one that is there."""
    if number != last.number + 1:
        return Break(last.number + 1, "missing", f"entry {last.number + 1} is not there, and {number} is")
    try:
        entry = dict(json.loads(data))
    except (ValueError, TypeError):
        return Break(number, "changed", f"entry {number} is not readable")
    if entry.get("number", number) != number:
        return Break(number, "changed", f"entry {number} says that it is {entry['number']}")
    if (entry.get("previous") or "") == last.hash:
        return None
    if not last.number:
        return Break(1, "changed", "entry 1 says that it was written after another one")
    words = f"entry {last.number} is not the one that {number} was written after: it was changed or put in"
    return Break(last.number, "changed", words)


def _end(last: tuple[Link, bytes], head: Link | None, *, has_head: bool) -> Break | None:
    """Whether the chain ends where its head says. A log from before there were heads has none, and no numbers inside."""
    link, data = last
    if head is None:
        if not has_head and b'"number": ' not in data:
            return None
        return Break(link.number, "head", f"{HEAD} is {'damaged' if has_head else 'gone'}: it says where the log ends")
    if head.number > link.number:
        words = f"the log was cut off: it ends with entry {link.number}, and {head.number} were written"
        return Break(link.number + 1, "cut off", words)
    return None


def _anchored(links: Sequence[Link], contains: Sequence[str], head: Link | None, shipped: Link | None) -> Break | None:
    """Whether what is known of the chain from elsewhere is still in it."""
    for name, known in (("head", head), ("copy", shipped)):
        if known and known.number > len(links):
            words = f"the {name} knows {known.number} entries, and {len(links)} are here"
            return Break(len(links) + 1, "cut off", words)
        if known and known.number and links[known.number - 1] != known:
            return Break(known.number, "changed", f"entry {known.number} is not the one that the {name} knows")
    for given in contains:
        if not any(link.hash.startswith(given.lower()) for link in links):
            words = f"no entry has the hash {given}: the log was rewritten, or the hash is another log's"
            return Break(len(links), "forgotten", words)
    return None


def _head(store: Store) -> tuple[Link | None, str | None]:
    """What the head says, None when it says nothing that can be read; and its tag, None when there is none."""
    document = store.read(HEAD)
    if document is None:
        return None, None
    try:
        output = json.loads(document.data)
        return Link(int(output["number"]), str(output["hash"])), document.etag
    except (IntegrityError, ValueError, TypeError, KeyError):
        return None, document.etag


def _newest(store: Store) -> Link:
    """The newest entry as the list has it: for a log without a head."""
    keys = [key for key in store.list(FOLDER) if _NUMBERED.fullmatch(key)]
    document = store.read(keys[-1]) if keys else None
    return Link(_number(keys[-1]), hash_of(document.data)) if document else NOTHING


def _advance(store: Store, made: Link, etag: str | None) -> None:
    """Move the head on to an entry, unless somebody else moved it further already."""
    data = json.dumps(asdict(made)).encode()
    while not store.replace(HEAD, data, etag=etag):
        head, etag = _head(store)
        if head and head.number >= made.number:
            return


def _documents(store: Store, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(keys), AT_ONCE * 16):
            some = keys[start : start + AT_ONCE * 16]
            yield from zip(some, map(_bytes, pool.map(store.read, some)), strict=True)


def _bytes(document: Document | None) -> bytes | None:
    """What a document says; of one that is damaged nothing, which is no entry."""
    try:
        return document.data if document else None
    except IntegrityError:
        return b""


def _number(key: str) -> int:
    return int(key[len(FOLDER) + 1 : -len(".json")])


def _key(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"
