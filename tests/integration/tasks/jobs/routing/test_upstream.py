"""Requests of the gateway to a server that answers byte for byte what a test says."""

import asyncio

import pytest

from tasks.jobs.routing.upstream import Asked, Broken, Unreachable, Upstream
from tasks.serving.protocol.routes import SECRET

HEADERS = [
    (b"a", b"\xe4\xff"),
    (b"te", b"trailers"),
    (b"host", b"elsewhere"),
    (b"content-length", b"9"),
    (b"empty", b""),
]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def ask(upstream, method=b"POST", headers=HEADERS):
    """Status and body of an answer, or what became of it."""
    try:
        reply = await upstream.ask(Asked(method, b"/x%20y?z=1", headers, b"abc"), timeout=5)
    except Unreachable:
        return "unreachable"
    try:
        return reply.status, b"".join([piece async for piece in reply.body()])
    except Broken:
        return reply.status, "broken"
    finally:
        reply.close()


def asked_twice(*parts, closes=False, method=b"POST", headers=HEADERS):
    """Two answers of a server that sends these parts for each request, what it read, and how many connections it saw."""
    read, connections = [], []

    async def serve(reader, writer):
        connections.append(writer)
        while head := await reader.readuntil(b"\r\n\r\n"):
            read.append(head + await reader.readexactly(3))
            for part in parts:
                writer.write(part)
                await writer.drain()
            if closes:
                writer.close()
                return

    async def main():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            upstream = Upstream(server.sockets[0].getsockname()[1], "secret")
            answers = [await ask(upstream, method, headers) for _ in range(2)]
            upstream.close()
        return answers, read, len(connections)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ([OK], b"hi"),
        ([OK[:20], OK[20:]], b"hi"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"hi"),
        ([CHUNKED + b"3\r\nabc\r\n", b"2;x=1\r\nde\r\n0\r\ntrailer: 1\r\n\r\n"], b"abcde"),
    ],
)
def test_a_connection_is_kept_when_the_answer_was_read_to_its_end(parts, body):
    assert asked_twice(*parts)[::2] == ([(200, body)] * 2, 1)


def test_an_answer_without_a_body_ends_with_its_head():
    assert asked_twice(b"HTTP/1.1 204 No Content\r\n\r\n")[::2] == ([(204, b"")] * 2, 1)
    assert asked_twice(OK[:-2], method=b"HEAD")[::2] == ([(200, b"")] * 2, 1)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 200 OK\r\nconnection: close"])
def test_a_server_may_close_the_connection_behind_its_answer(head):
    assert asked_twice(head + b"\r\n\r\nhi", closes=True)[::2] == ([(200, b"hi")] * 2, 2)


@pytest.mark.parametrize(
    "answer",
    [
        OK[:-1],
        CHUNKED + b"3\r\nab",
        CHUNKED + b"zz\r\nab\r\n",
        CHUNKED + b"-5\r\nab\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_ends_before_its_end_is_broken(answer):
    assert asked_twice(answer, closes=True)[0] == [(200, "broken")] * 2


@pytest.mark.parametrize(
    "answer", [b"", OK[:20], b"SSH-2.0 x\r\n\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", OK.replace(b"2\r", b"x\r")]
)
def test_what_is_no_answer_is_none(answer):
    assert asked_twice(answer, closes=True)[0] == ["unreachable"] * 2


def test_what_comes_behind_an_answer_is_not_the_next_callers():
    assert asked_twice(OK + OK.replace(b"hi", b"no"))[::2] == ([(200, b"hi")] * 2, 2)


def test_a_kept_connection_that_the_server_closed_costs_no_request():
    """The server says nothing of it; whoever asks next gets a new connection, also with a POST."""
    answers, read, connections = asked_twice(OK, closes=True)
    assert (answers, len(read), connections) == ([(200, b"hi")] * 2, 2, 2)


def test_a_request_goes_out_as_it_came_but_for_what_belongs_to_the_connection():
    _, (first, again), _ = asked_twice(OK)
    head, *lines = first[:-7].split(b"\r\n")
    assert first == again and first.endswith(b"\r\n\r\nabc")
    assert head == b"POST /x%20y?z=1 HTTP/1.1"
    wanted = {b"a: \xe4\xff", b"empty: ", b"content-length: 3", b"%b: secret" % SECRET.lower().encode()}
    assert wanted < {line if line.startswith(b"a") else line.lower() for line in lines}
    assert len(lines) == 5 and any(line.lower().startswith(b"host: 127.0.0.1:") for line in lines)
