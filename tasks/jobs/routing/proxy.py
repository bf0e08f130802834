"""The gateway's front: an ASGI application that hands each request to a server, and its answer back as it comes.

A request that fails before the first byte of an answer is sent again, once, to the main colour or to another server: nothing was
sent, and a completion changes nothing. One that a model died with is not: it may be what it died of. Who gets it is table.py; the
connection to the server is upstream.py.

Sends another colour's share back to the main one when it plainly fails, or when whoever moves the traffic died.

It needs no deployer: the gateway itself decides, at once, by the test of failures that the deployer's judge has
(tasks/serving/protocol/judge.py), and keeps what it decided over a crash of its own. What takes a comparison, slowness or odd
answers, is for the judge.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.config.serving import LimitsConfig
from tasks.jobs.routing.counts import LOOKED_AT, Counts, Totals, Waiting, ended, look
from tasks.jobs.routing.table import Replica, Table
from tasks.jobs.routing.upstream import Answer, Asked, Broken, Unreachable
from tasks.serving.protocol.judge import SequentialTest, error_test, late
from tasks.serving.protocol.routes import GONE, LOADING, MIRROR, TRAFFIC, USER, Routes

LATE_LOOK_SECONDS = 0.25
"""Between two looks for requests that hang."""
ORPHAN_SECONDS = 10.0
"""Time after which a deployer that died in the middle is no longer waited for."""
log = logging.getLogger("headway.gateway")


class Breaker:
    """State: the test of each model, since when the deployer is seen dead; what it decided is in the table and in `trip.json`."""

    def __init__(self, folder: Path, table: Table, counts: Counts) -> None:
        self._path, self._table, self._counts = folder / "trip.json", table, counts
        self._tests: dict[str, SequentialTest] = {}
        self._orphan_since: float | None = None
        self._looked = 0.0
        table.tripped = process.read_json(self._path)

    def count(self, colour: str, *, failed: bool) -> None:
        """Count a request, and send traffic back when a colour that is not the main one has failed too often."""
        routes = self._table.routes
        if routes is None or colour == routes.main or self._table.lost():
            return
        test = self._test(colour)
        if test.add(1, int(failed)) == "bad" and failed:
            self._trip(colour, f"{test.total_beyond} of its {test.total} requests failed")

    def look_for_late(self) -> None:
        """Send traffic back when too many of the requests that a colour has are late: who hangs has not failed yet."""
        routes, now = self._table.routes, time.monotonic()
        if routes is None or now - self._looked < LATE_LOOK_SECONDS or self._table.lost():
            return
        self._looked = now
        for name, group in self._table.groups.items():
            waits = self._counts.waits(group.colour.servers[0].server) if name != routes.main else []
            if not waits:
                continue
            hang, test = self._late(waits), self._test(name)
            if hang and test.is_bad(more=hang):
                self._trip(name, f"{test.total_beyond} of its {test.total} requests failed, {hang} under way are late")

    def is_late(self, colour: str, seconds: float) -> bool:
        """Whether a request to a colour that is not the main one has waited too long, by what callers wait for the main one."""
        return self._table.routes is not None and colour != self._table.routes.main and bool(self._late([seconds]))

    def _late(self, waits: Iterable[float]) -> int:
        routes = self._table.routes
        assert routes is not None
        longest, requests = self._counts.longest_wait(routes.colours[routes.main].servers[0].server)
        return late(waits, longest=longest, requests=requests)

    def _test(self, colour: str) -> SequentialTest:
        """Of the model that has the colour now; one with other limits begins anew."""
        routes = self._table.routes
        assert routes is not None
        server = self._table.groups[colour].colour.servers[0].server
        test = self._tests.get(server)
        if test is None or test.share != routes.max_error_share:
            self._tests = {server: error_test(routes.max_error_share)}
        return self._tests[server]

    def look_for_deployer(self) -> None:
        """Send traffic back when it is shared and nobody is left who would judge it."""
        routes = self._table.routes
        shared = routes is not None and (routes.mirror or routes.colours[routes.main].weight < 100)
        if routes is None or not shared or not routes.deployer or process.alive(routes.deployer) or self._table.lost():
            self._orphan_since = None
            return
        self._orphan_since = self._orphan_since or time.monotonic()
        if time.monotonic() - self._orphan_since >= ORPHAN_SECONDS:
            name = next((name for name in self._table.groups if name != routes.main), "")
            if name:
                self._trip(name, "whoever moved the traffic died in the middle")

    def _trip(self, colour: str, why: str) -> None:
        group = self._table.groups[colour]
        output: dict[str, Any] = {"server": group.colour.servers[0].server, "why": why, "time": time.time()}
        self._table.tripped = output
        process.write_json(self._path, output, seal=True)
        log.error("%s (%s) lost its traffic: %s", colour, group.colour.model_ref, why)
        self._table.notify()


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
COUNTED = ("/v1/completions", "/v1/chat/completions", "/score")
MOST_COPIES = 4
"""Mirrored requests under way; what comes beyond is not copied."""
FIRST_SHARE = 0.9
"""Of what is left of a request's time, for a server that is not the last to be asked: the next one has what is left."""
LATE_SHARE = 0.5
"""Of a request's time: who was asked for so long and had not begun its answer has failed, whoever gave up first. A model that is
not the main one is late by the main one's waits already."""


class Proxy:
    """State: the copies under way. Everything else is in the table and in the counts."""

    def __init__(self, table: Table, counts: Counts, breaker: Breaker, *, limits: LimitsConfig) -> None:
        """`limits`: those of the edge before it."""
        self._table, self._counts, self._breaker = table, counts, breaker
        self._timeout = limits.request_seconds
        self._patience = min(limits.loading_seconds, limits.request_seconds)
        self._copies: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/livez":
            await say(send, 200, {"alive": True})
            return
        asked = await self._asked(scope, receive)
        me, gone = asyncio.current_task(), False

        def leave(_: asyncio.Future[Message]) -> None:
            nonlocal gone
            gone = True
            if me:
                me.cancel()

        watcher = asyncio.ensure_future(receive())  # says so when the caller goes away
        watcher.add_done_callback(leave)
        try:
            await self._serve(scope, asked, send)
        except asyncio.CancelledError:
            if not gone:
                raise
        finally:
            watcher.remove_done_callback(leave)
            watcher.cancel()

    async def _serve(self, scope: Message, asked: Asked, send: Send) -> None:
        counted = scope["method"] == "POST" and scope["path"] in COUNTED
        routes = self._table.routes
        assert routes is not None  # the gateway listens once it has routes
        began, tried = time.perf_counter(), list[Replica]()
        turn = began
        """When this colour's time began: the next one's is its own."""
        colour = self._colour_for(asked, routes) if counted else routes.main
        if counted and (copied := self._table.mirrors_to(colour)) and len(self._copies) < MOST_COPIES:
            task = asyncio.create_task(self._ask_copy(copied, asked))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)
        for again in (True, False):
            instead = routes.main if again and colour != routes.main else None
            left = max(self._patience - (time.perf_counter() - began), 0.0)
            waits = 0.0 if instead and self._table.best(instead) else left
            replica = await self._table.take(colour, tried, patience=waits)
            if replica is None and instead is None:
                return await say(send, 503, error(503, "no server answers now: try again in a second"), retry=True)
            if replica is not None:
                tried.append(replica)
                replica.inflight += 1
                try:
                    other = instead or self._table.best(colour, tried)
                    with self._waiting(colour, counted=counted) as waiting:
                        with self._given_up(colour, counted=counted):
                            answer = await self._ask(replica, asked, began, last=not again, alone=other is None)
                        if answer is not None:
                            return await self._pass_on(replica, answer, send, waiting, began=turn, counted=counted)
                except Unreachable as late:
                    self._failed(colour, turn, counted=counted)
                    return await say(send, 504, error(504, str(late)), retry=True)
                finally:
                    replica.inflight -= 1
            if instead or replica is None or replica.health != "loading":
                self._failed(colour, turn, counted=counted, replayed=again)
            colour, turn = instead or colour, time.perf_counter()
        return await say(send, 502, error(502, "the server broke off before it answered: try again"), retry=True)

    def _colour_for(self, asked: Asked, routes: Routes) -> str:
        """By its share; who names a model gets that one while it has a share, and never a 404 for the turn that it met."""
        if b'"model"' in asked.body and len(self._table.groups) > 1:
            with suppress(ValueError, AttributeError):
                named = json.loads(asked.body).get("model")
                for name, colour in routes.colours.items():
                    if named == colour.model_ref:
                        return name if self._table.weights()[name] else routes.main
        return self._table.next_colour() or routes.main

    @contextmanager
    def _given_up(self, colour: str, *, counted: bool) -> Iterator[None]:
        """Count as failed what hung until the edge gave it up, or its caller did after a long wait."""
        asked = time.perf_counter()
        try:
            yield
        except asyncio.CancelledError:
            waited = time.perf_counter() - asked
            if waited > LATE_SHARE * self._timeout or self._breaker.is_late(colour, waited):
                self._failed(colour, asked, counted=counted)
            raise

    async def _ask(self, replica: Replica, asked: Asked, began: float, *, last: bool, alone: bool) -> Answer | None:
        """The answer; None when there was none, or one of 5xx that somebody else, or this one once it is loaded, can better.

        A request that a model died with goes to nobody else: it may be what it died of. `last`: it was asked before; `alone`:
        there is nobody else. Raises Unreachable when it is late and nobody else is to be asked.
        """
        final = last or alone
        left = max(self._timeout - (time.perf_counter() - began), 0.0)
        timeout = self._timeout if final else FIRST_SHARE * left
        try:
            answer = await replica.upstream.ask(asked.with_header(TRAFFIC.encode(), USER.encode()), timeout=timeout)
        except Unreachable as error:
            if error.late and final:
                raise
            if not error.late:
                self._table.lost_sight(replica)
            return None
        taken, loading = bool(answer.header(GONE.encode())), bool(answer.header(LOADING.encode()))
        if taken or loading:
            self._table.lost_model(replica)
        if answer.status >= 500 and not taken and (not final or (loading and not last)):
            answer.close()
            return None
        return answer

    def _waiting(self, colour: str, *, counted: bool) -> AbstractContextManager[Waiting | None]:
        group = self._table.groups.get(colour)
        counts = counted and group is not None
        return self._counts.waiting_for(group.colour.servers[0].server) if counts and group else nullcontext()

    async def _pass_on(
        self, replica: Replica, answer: Answer, send: Send, waiting: Waiting | None, *, began: float, counted: bool
    ) -> None:
        headers = list(answer.headers)
        if answer.length is not None:
            headers.append((b"content-length", answer.length))
        taken, first = bytearray(), None
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece in answer.body():
                if first is None and waiting:
                    first = time.perf_counter() - began
                    waiting.ends(waiting)
                if len(taken) < LOOKED_AT:
                    taken += piece
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Broken:  # uvicorn closes the connection of an answer that is not finished: the caller sees that
            self._note(replica.colour, began, failed=True, counted=counted)
            return
        finally:
            answer.close()
        await send({"type": "http.response.body", "body": b""})
        if counted and not 400 <= answer.status < 500:
            failed = answer.status >= 500
            result = {} if failed else look(answer, bytes(taken))
            self._note(replica.colour, began, failed=failed, counted=True, first=first, **result)

    async def _ask_copy(self, colour: str, asked: Asked) -> None:
        """Ask for an answer that nobody gets."""
        began, result, first = time.perf_counter(), None, None
        replica = self._table.best(colour)
        if replica is not None:
            with suppress(Unreachable, Broken, TimeoutError), self._waiting(colour, counted=True) as waiting:
                async with asyncio.timeout(self._timeout):
                    copy = asked.with_header(TRAFFIC.encode(), MIRROR.encode())
                    answer = await replica.upstream.ask(copy, timeout=self._timeout)
                    try:
                        taken = bytearray()
                        async for piece in answer.body():
                            if first is None and waiting:
                                first = time.perf_counter() - began
                                waiting.ends(waiting)
                            taken += piece
                    finally:
                        answer.close()
                    if 400 <= answer.status < 500:
                        return
                    result = look(answer, bytes(taken)) if answer.status < 500 else None
        self._note(colour, began, failed=result is None, counted=True, mirrored=True, first=first, **(result or {}))

    def _failed(self, colour: str, began: float, *, counted: bool, replayed: bool = False) -> None:
        if counted and replayed:
            self._counts.totals.setdefault(colour, Totals()).replayed += 1
        self._note(colour, began, failed=True, counted=counted)

    def _note(self, colour: str, began: float, *, failed: bool, counted: bool, **measured: Any) -> None:
        group = self._table.groups.get(colour)
        if not counted or group is None:
            return
        self._counts.add(group.colour.servers[0].server, colour, ended(began, failed=failed, **measured))
        self._breaker.count(colour, failed=failed)

    async def _asked(self, scope: Message, receive: Receive) -> Asked:
        """The whole request; the edge has read its body already, within its limits."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = scope["query_string"]
        target = (scope["raw_path"] or b"/") + (b"?" + query if query else b"")
        return Asked(scope["method"].encode(), target, list(scope["headers"]), bytes(body))


def error(status: int, message: str) -> dict[str, Any]:
    """The body of a refusal, in OpenAI's form."""
    return {"error": {"message": message, "type": "unavailable", "code": status}}


async def say(send: Send, status: int, value: Any, *, retry: bool = False) -> None:
    """Send a JSON answer of the gateway's own."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if retry:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
