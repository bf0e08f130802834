"""Servers of this machine that are starting: what a command that needs one says, and for how long."""

import json
import os
import re
import socket
import threading
import time

import pytest
from support import Home

from deployments.platform.state import words
from deployments.services.starting import free_port, starting, wait_until_it_answers
from tasks.common import process
from tasks.common.errors import Missing


@pytest.fixture
def server(tmp_path):
    """A server whose process lives, as this one does, and that began 40 s ago at a port where nobody listens."""
    folder = tmp_path / "prefect"
    folder.mkdir()
    me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
    process.write_json(folder / "handle.json", me, seal=True)
    process.write_json(folder / "attempts.json", {"attempts": 1}, seal=True)
    os.utime(folder / "attempts.json", (time.time() - 40,) * 2)
    (folder / "server.log").write_text("")
    port = free_port()
    made = {"url": f"http://127.0.0.1:{port}", "port": port, "since": time.time() - 4000, "folder": str(folder)}
    (folder / "server.json").write_text(json.dumps(made))
    return made


def test_a_server_that_does_not_listen_yet_is_starting_since_its_program_started(server):
    assert 40 <= starting(server) < 100
    with socket.create_server(("127.0.0.1", server["port"])):
        assert starting(server) is None


def test_status_tells_a_server_that_is_starting_from_one_that_runs(server, tmp_path):
    state = Home(tmp_path).ok("status").said
    part = state["parts"][0]
    assert part["name"] == "prefect" and part["running"] and part["starting_seconds"] >= 40
    assert re.match(rf"prefect  starting, for \d+ s so far: {server['url']} does not listen yet$", words(state)[0])
    part["starting_seconds"] = None
    assert words(state)[0].startswith("prefect  running since ")


def test_whoever_waits_is_told_that_it_is_still_starting_and_for_how_long(server, monkeypatch):
    monkeypatch.setattr("deployments.services.starting.SAY_SECONDS", 0.0)
    lines, listening = [], threading.Event()
    wait_until_it_answers("Prefect's server", server, lambda: bool(lines) or listening.is_set(), lines.append)
    assert lines[0].startswith("Prefect's server is still starting, for 4")


def test_one_that_starts_for_too_long_is_not_called_silent_and_its_empty_log_is_not_named(server):
    with pytest.raises(Missing, match=r"is still starting, after 4\d s$") as raised:
        wait_until_it_answers("Prefect's server", server, lambda: False, start_seconds=0.0)
    assert "log" not in f"{raised.value.message} {raised.value.remedy}" and "again" in raised.value.remedy


def test_one_that_listens_and_does_not_answer_is_an_error(server):
    with socket.create_server(("127.0.0.1", server["port"])), pytest.raises(Missing, match="does not answer$"):
        wait_until_it_answers("Prefect's server", server, lambda: False, silent_seconds=0.0)


def test_one_that_ended_is_told_with_what_its_log_ends_with(server, tmp_path):
    log = tmp_path / "prefect" / "server.log"
    process.write_json(
        tmp_path / "prefect" / "handle.json", {"pid": 1, "started": "never", "boot_id": "another"}, seal=True
    )
    with pytest.raises(Missing, match="ended before it answered$"):
        wait_until_it_answers("Prefect's server", server, lambda: False)
    log.write_text("no such module: uvicorn\n")
    with pytest.raises(Missing, match="ended before it answered; the end of .*\nno such module: uvicorn$"):
        wait_until_it_answers("Prefect's server", server, lambda: False)
