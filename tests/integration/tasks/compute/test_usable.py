"""How many machines a job could get."""

import pytest

from tasks.compute import machines_of
from tasks.config.cluster import ClusterConfig

SINFO = """#!/bin/sh
cat <<EOF
main*|n1|idle
main*|n2|allocated
main*|n3|drained
main*|n4|down*
main*|n5|idle~
main*|n6|mixed
small|n1|idle
small|n7|draining
EOF
"""


@pytest.fixture
def sinfo(tmp_path, monkeypatch):
    (tmp_path / "sinfo").write_text(SINFO)
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 4),
        ({"exclude": ("n1",)}, 3),
        ({"slurm": {"partition": "small"}}, 1),
        ({"slurm": {"partition": "none"}}, 0),
        ({"slurm": {"partition": "small,main"}}, 4),  # n1 is in both
    ],
)
def test_slurm_counts_what_is_in_order_in_the_partition_of_the_job(sinfo, changes, count):
    assert machines_of(ClusterConfig.model_validate({"backend": "slurm", **changes})).count() == count


def test_of_machines_that_are_named_no_others_are_counted(sinfo):
    slurm = ClusterConfig(backend="slurm")
    counts = {names: machines_of(slurm).count(names) for names in ((), ("n1", "n2"), ("n1", "n3", "n4"), ("n9",))}
    assert counts == {(): 4, ("n1", "n2"): 2, ("n1", "n3", "n4"): 1, ("n9",): 0}
    ssh = ClusterConfig(backend="ssh", ssh={"hosts": ["a@n1", "n2", "n3"]}, exclude=("n2",))
    assert (machines_of(ssh).count(), machines_of(ssh).count(("n1", "n2"))) == (2, 1)


def test_ssh_counts_its_hosts_and_others_cannot_say():
    config = ClusterConfig(backend="ssh", ssh={"hosts": ["a@n1", "a@n2:22", "n3"]}, exclude=("n2",))
    assert machines_of(config).count() == 2
    assert machines_of(ClusterConfig()).count() is None
