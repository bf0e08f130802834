"""Overload of a server: ten times the clients that it can take. Accepted requests stay quick, refused ones are told at once.

    python benchmarks/overload.py [SECONDS] [MODEL_FOLDER] [PAUSE]

A closed loop of clients in a process of their own, pinned to one core; the server and its model are pinned to another. First as
many clients as the server lets in, which is its load without overload; then ten times as many, for SECONDS (60). A client that is
refused is told to come back in a second, and does so after PAUSE (0.05 s). max_tokens is 4, the model the tests' tiny one.
Goals: p95 of what is accepted at most twice what it was, refusals within 50 ms, memory flat.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from benchmarks.scratch import scratch  # noqa: E402

WAITING = 4
ROUNDS = 6
BODY = json.dumps({"prompt": "def ", "max_tokens": 4}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
GOALS = {"slowdown": 2.0, "refusal_ms": 50.0, "memory_mb": 30.0}


async def client(port: int, end: float, found: list[tuple[int, float]], pause: float) -> None:
    """Ask again as soon as there is an answer, over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < end:
        began = time.perf_counter()
        writer.write(REQUEST % (len(BODY), BODY))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        status = int(head.split(b" ", 2)[1])
        found.append((status, time.perf_counter() - began))
        if status == 429:
            await asyncio.sleep(pause)
    writer.close()


async def load(port: int, clients: int, seconds: float, pause: float) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    end = time.monotonic() + seconds
    await asyncio.gather(*(client(port, end, found, pause) for _ in range(clients)))
    return found


def clients_of(port: int, clients: int, seconds: float, *, core: int, pause: float) -> list[tuple[int, float]]:
    """Run the clients in a process of their own, on one core."""
    argv = [sys.executable, __file__, "--clients", str(port), str(clients), str(seconds), str(pause)]
    said = subprocess.run(
        argv, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    return [(status, took) for status, took in json.loads(said.stdout)]


def share(times: list[float], part: float) -> float:
    """A quantile, in milliseconds."""
    ordered = sorted(times)
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def figures(found: list[tuple[int, float]], seconds: float) -> dict[str, float]:
    accepted = [took for status, took in found if status == 200]
    refused = [took for status, took in found if status == 429]
    return {
        "accepted_per_second": len(accepted) / seconds,
        "refused_per_second": len(refused) / seconds,
        "accepted_p50_ms": share(accepted, 0.5),
        "accepted_p95_ms": share(accepted, 0.95),
        "accepted_p99_ms": share(accepted, 0.99),
        "refused_p50_ms": share(refused, 0.5),
        "refused_p95_ms": share(refused, 0.95),
        "refused_max_ms": share(refused, 1.0),
        "others": float(sum(status not in (200, 429) for status, _ in found)),
    }


def memory(pid: int) -> float:
    """Resident memory of a process and all below it, in MB."""
    from tasks.common.process import descendants

    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *descendants(pid))]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(model: Path, folder: Path, seconds: float, pause: float) -> dict[str, object]:
    """Both loads on one server."""
    from api_stand import serving

    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[0], cores[-1]
    os.sched_setaffinity(0, {theirs})  # what is started from here inherits it: the server
    limits = {"waiting": WAITING, "requests_per_minute": 10**9, "tokens_per_minute": 10**12}
    with serving(folder, model, limits=limits) as server:
        clients_of(server.port, 10 * WAITING, 5, core=ours, pause=pause)
        calm, storm, used = list[tuple[int, float]](), list[tuple[int, float]](), [memory(server.process.pid)]
        for _ in range(ROUNDS):  # in turn: other work on the machine must not meet one of them only
            calm += clients_of(server.port, WAITING, seconds / ROUNDS / 3, core=ours, pause=0)
            storm += clients_of(server.port, 10 * WAITING, seconds / ROUNDS, core=ours, pause=pause)
            used.append(memory(server.process.pid))
        assert server.process.poll() is None
    unloaded, overloaded = figures(calm, seconds / 3), figures(storm, seconds)
    return {
        "load_average": os.getloadavg()[0],
        "pause": pause,
        "unloaded": unloaded,
        "overloaded": overloaded,
        "slowdown_p95": overloaded["accepted_p95_ms"] / unloaded["accepted_p95_ms"],
        "memory_mb": used,
        "goals": GOALS,
    }


def main() -> None:
    if sys.argv[1:2] == ["--clients"]:
        port, clients, seconds, pause = (float(word) for word in sys.argv[2:])
        print(json.dumps(asyncio.run(load(int(port), int(clients), seconds, pause))))
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
    with scratch() as folder:
        if len(sys.argv) > 2:
            model = Path(sys.argv[2])
        else:
            from tiny_model import export_tiny

            os.environ["HEADWAY_HOME"] = str(folder / "home")
            model = export_tiny(folder / "tiny")
        print(json.dumps(measure(model, folder / "server", seconds, pause), indent=1))


if __name__ == "__main__":
    main()
