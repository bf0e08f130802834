"""Sound machines are not blamed: `make soak N=20`. Each round qualifies four machines with networks of their own under Slurm."""

import os

import pytest
from four_machines import four_machines

ROUNDS = int(os.environ.get("N", "1"))


@pytest.mark.soak
def test_none_of_four_sound_machines_is_flagged(fresh, tmp_path):
    with four_machines(tmp_path) as (_, path):
        for number in range(ROUNDS):
            ran = fresh.ok("qualify", "-c", "tiny", "-c", path)
            assert {node["verdict"] for node in ran.said["nodes"]} == {"healthy"}, (number, ran.said["nodes"])
            print(f"round {number + 1} of {ROUNDS}: {ran.said['verdict']}")
