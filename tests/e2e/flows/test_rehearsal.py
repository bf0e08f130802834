"""`headway rehearse -c tiny`: every fault that this machine allows, and some at random; each promise holds."""

import json
import os
import subprocess

import pytest
from azurite import node, program
from support import HEADWAY
from waiting import limit

pytestmark = pytest.mark.e2e
MINUTES = 45
NOT_TRIED = {"machine-off": "--switch-off", "disk-full": "unshare"}
"""What a machine may not allow, and what the reason names."""


@pytest.fixture
def azurite_on_path(tmp_path):
    """A folder with Azurite's command for a PATH."""
    command = tmp_path / "bin" / "azurite-blob"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{node()}" "{program()}" "$@"\n')
    command.chmod(0o700)
    return command.parent


@pytest.mark.long
@pytest.mark.timeout(3 * MINUTES * 60)
def test_every_promise_holds(fresh, azurite_on_path):
    environment = fresh.environment()
    environment["PATH"] = f"{azurite_on_path}{os.pathsep}{environment['PATH']}"
    words = [HEADWAY, "rehearse", "-c", "tiny", "--hours", "0.1", "--json"]
    command = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = command.communicate(timeout=limit(MINUTES * 60))
    finally:
        command.terminate()  # it stops what runs in its home
        command.communicate()
    assert out.strip(), err
    report = json.loads(out)
    failed = [one["name"] for one in report["results"] if one["verdict"] == "failed"]
    assert not failed and report["passed"] and command.returncode == 0, err
    not_tried = {one["name"]: one["why"] for one in report["results"] if one["verdict"] == "not tried"}
    assert set(not_tried) <= set(NOT_TRIED), not_tried
    assert all(NOT_TRIED[name] in why for name, why in not_tried.items())
    assert any(one["name"].startswith("random-") for one in report["results"])
