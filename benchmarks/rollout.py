"""What the gateway costs, how soon it is back, and how long a rollout and the way back take while 50 requests a second come in.

`python -m benchmarks.rollout [--requests N] [--times N]`. Cost: one client with one connection asks a server that has no model,
directly and through the gateway, by turns; the server keeps connections. Back: `kill -9` of the gateway until it
answers. Rollout and way back: real servers with a tiny exported model; the model before is kept warm, or started again. Every
answer that is not 200 with the right text counts as failed. The load of the machine is told beside. Run by `make bench`.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]

from benchmarks.scratch import scratch  # noqa: E402

BODY = json.dumps({"prompt": "def ", "max_tokens": 4}).encode()
JSON = {"Content-Type": "application/json"}
WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    with scratch() as folder:
        os.environ["HEADWAY_HOME"] = str(folder / "home")
        told = {
            "cost": cost(folder / "cost", chosen.requests),
            "back": back(folder / "back", chosen.times),
            "way back": way_back(folder / "way", chosen.times),
            "load": os.getloadavg()[0],
        }
    print(json.dumps(told, indent=1))
    row = told["cost"]
    print(f"the gateway costs {row['median_ms']:.2f} ms (median), p95 {row['p95_ms']:.2f} ms", file=sys.stderr)
    print(f"after kill -9 it answers in {statistics.median(told['back']):.2f} s (median)", file=sys.stderr)
    for name, rows in told["way back"].items():
        seconds = statistics.median(row["seconds"] for row in rows)
        failed, count = sum(row["failed"] for row in rows), sum(row["requests"] for row in rows)
        print(f"{name}: {seconds:.2f} s (median), {failed} of {count} requests failed", file=sys.stderr)


def cost(folder, count):
    """Milliseconds that a request takes longer through the gateway."""
    from endpoint_stand import Endpoint

    endpoint = Endpoint(folder)
    try:
        record = endpoint.serve(sticky=True)
        private = json.loads((Path(record["folder"]) / "serve.json").read_text())["port"]
        lines = [http.client.HTTPConnection("127.0.0.1", port) for port in (private, endpoint.port)]
        took = ([], [])
        for number in range(count + WARM_UP):
            for line, seconds in zip(lines, took, strict=True):
                began = time.perf_counter()
                line.request("POST", "/v1/completions", BODY, JSON)
                assert line.getresponse().read()
                if number >= WARM_UP:
                    seconds.append(time.perf_counter() - began)
    finally:
        endpoint.stop()
    direct, through = (sorted(seconds) for seconds in took)
    more = {
        name: 1000 * (through[int(share * count)] - direct[int(share * count)])
        for name, share in (("median_ms", 0.5), ("p95_ms", 0.95))
    }
    return {**more, "direct_median_ms": 1000 * direct[count // 2], "through_median_ms": 1000 * through[count // 2]}


def back(folder, times):
    """Seconds from `kill -9` of the gateway to its next answer."""
    from endpoint_stand import Endpoint, ask
    from waiting import until

    endpoint, found = Endpoint(folder), []

    def answers():
        try:
            return ask(endpoint.port, json.loads(BODY), timeout=5)[0] == 200
        except OSError:
            return False

    try:
        endpoint.serve()
        for _ in range(times):
            time.sleep(3)  # it is steady by then
            pid = until(endpoint.gateway.state)["pid"]
            os.kill(pid, signal.SIGKILL)
            began = time.perf_counter()
            until(answers)
            found.append(time.perf_counter() - began)
    finally:
        endpoint.stop()
    return found


def way_back(folder, times):
    """Seconds of a rollout and of the way back, and what the clients got meanwhile."""
    from endpoint_stand import Clients
    from tiny_model import export_tiny, files_of

    from tasks.common.process import read_json
    from tasks.config.serving import DeploymentConfig
    from tasks.serving import open_endpoint

    folder.mkdir(parents=True)
    model, endpoint = export_tiny(folder), open_endpoint(folder, "bench")
    files, golden = files_of(model), read_json(model / "golden.json")

    def deploy(ref, warm):
        config = DeploymentConfig.model_validate({"rollout": {"keep_warm_seconds": warm, "least_seconds": 0.0}})
        candidate = endpoint.start(model, ref, files=files, golden=golden, timeout=120, config=config)
        return lambda: endpoint.switch(candidate)

    rows = {"rollout": [], "back, kept warm": [], "back, started again": []}
    try:
        at = deploy("model/tiny@00000000", 600)()
        for number in range(times):
            for name, warm in (("back, kept warm", 600.0), ("back, started again", 0.0)):
                with Clients(at.port, rate=50) as clients:
                    rows["rollout"].append(timed(deploy(f"model/tiny@{number}{warm:.0f}", warm), clients))
                    rows[name].append(timed(lambda: endpoint.go_back("benchmark"), clients))
    finally:
        endpoint.stop()
    return rows


def timed(work, clients):
    """Seconds of some work under clients, and their requests in it and in the second after."""
    asked, failed = sum(clients.got.values()), len(clients.failed)
    time.sleep(1.0)
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    time.sleep(1.0)
    bad = len(clients.failed) - failed
    return {"seconds": seconds, "failed": bad, "requests": sum(clients.got.values()) - asked + bad}


if __name__ == "__main__":
    main()
