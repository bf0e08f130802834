"""A rollback that is killed at any of its durable writes is finished or reverted by the next start, and nobody notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from endpoint_stand import BLUE, GREEN, Clients, Endpoint, ask
from waiting import limit, until

from tasks.common import process
from tasks.config.serving import RolloutConfig
from tasks.serving.journal import refused_models
from tasks.serving.protocol.routes import read_routes
from tasks.serving.rollout import roll_out, settle

PROGRAM = """
import os, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from pathlib import Path
from tasks.serving.journal import Journal
from tasks.serving.local.rollout import go_back
folder, at, after = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "after"
fsync, count = os.fsync, 0
def dying(descriptor):
    global count
    if count == at and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
os.fsync = dying
go_back(folder, Journal(folder / "journal.jsonl"), reason="worse", taken=None, report=lambda event, details: None)
"""
BEGIN, ROUTES, COMMIT, ROUTES_AGAIN, RECORD, REFUSED, WRITES = 0, 1, 2, 3, 4, 5, 8
"""What a rollback to a warm server writes that must last, in this order; then the routes without sharing, and `done`."""


def killed_and_settled(folder, at, after):
    """The exit code of a rollback that is killed at a write; what the next start makes of it must be whole."""
    endpoint = Endpoint(folder)
    try:
        endpoint.serve()
        roll_out(endpoint.beside(), RolloutConfig(step_requests=0, step_seconds=0), endpoint.journal)
        words = [PROGRAM.format(root=str(Path(__file__).parents[4])), str(folder), str(at), "after" if after else ""]
        with Clients(endpoint.port) as clients:
            code = subprocess.run([sys.executable, "-c", *words], timeout=limit(60), check=False).returncode
            lines = [line["event"] for line in endpoint.journal.lines()]
            committed = "commit" in lines[lines.index("done") + 1 :]  # the first one is the deploy's
            if committed:
                shares = {c.model_ref: c.weight for c in read_routes(endpoint.gateway.routes).colours.values()}
                assert shares[BLUE] == 100, "the traffic was not there when it was committed"
            if endpoint.journal.open_change():
                assert settle(endpoint.traffic(), endpoint.journal) == ("done" if committed else "reverted")
            wanted = BLUE if committed else GREEN
            record = process.read_json(endpoint.folder / "endpoint.json")
            assert record["model_ref"] == wanted
            assert json.loads(ask(endpoint.port, {"prompt": "a", "max_tokens": 4})[2])["model"] == wanted
            assert list(refused_models(folder)) == ([GREEN] if committed else []), "what serves is not refused"
            until(lambda: clients.got[wanted] > 3)
        assert not clients.failed, clients.failed[:3]
    finally:
        endpoint.stop()
    return code


@pytest.mark.parametrize(
    ("at", "after"), [(ROUTES, True), (COMMIT, True), pytest.param(RECORD, True, marks=pytest.mark.long)]
)
def test_a_rollback_that_is_killed_is_finished_or_reverted(tmp_path, at, after):
    assert killed_and_settled(tmp_path / "e", at, after) == -9


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rollback_that_is_killed_at_any_write(tmp_path):
    kills = [(at, after) for at in range(WRITES + 2) for after in (False, True)]
    codes = [killed_and_settled(tmp_path / f"{at}-{after}", at, after) for at, after in kills]
    print(f"{codes.count(-9)} kills, {codes.count(0)} rollbacks that were done before")
    assert set(codes) == {-9, 0} and codes.count(-9) >= 2 * WRITES
