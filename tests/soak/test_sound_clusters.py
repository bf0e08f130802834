"""Sound machines are not blamed: `make soak N=20`. Each round qualifies four machines with networks of their own under Slurm."""

import os

import pytest
from four_machines import four_machines

ROUNDS = int(os.environ.get("N", "1"))


def reasons(ran):
    """Why some machine is not healthy."""
    return [{"node": node["name"], **reason} for node in ran.said["nodes"] for reason in node["reasons"]]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_none_of_four_sound_machines_is_flagged(fresh, tmp_path):
    with four_machines(tmp_path) as (_, path):
        for number in range(ROUNDS):
            ran = fresh.ok("qualify", "-c", "tiny", "-c", path)
            print(f"round {number + 1} of {ROUNDS}: {ran.said['verdict']}", *reasons(ran), sep="\n  ")
            assert {node["verdict"] for node in ran.said["nodes"]} == {"healthy"}
