"""A corpus that is profiled and tokenized on several machines: on a real Slurm, a real Ray and real sshd, with one machine lost.

The jobs are the stages' own. What they make must be what one process makes, bit for bit.
"""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from data_material import PARTS, run_stage, write_corpus
from ray_stand import RayStand
from slurm_jobs import reachable
from slurm_stand import slurm
from ssh_stand import ssh_stand
from waiting import limit, until

from tasks.config.cluster import ClusterConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "dataset")


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """What one process of this machine makes."""
    base = tmp_path_factory.mktemp("alone")
    return {stage: run_stage(stage, ClusterConfig(), corpus, base / stage / "job")[1] for stage in PARTS}


@contextmanager
def on_slurm(tmp_path_factory):
    with slurm(3) as stand, reachable(stand):

        def again():
            stand.revive("n2")
            stand.wait_idle()

        yield {"slurm": {"requeue": False}}, lambda: stand.kill_node("n2"), again


@contextmanager
def on_ssh(tmp_path_factory):
    with ssh_stand(tmp_path_factory.mktemp("ssh"), count=3) as stand:
        second = stand.machines[1]
        yield {"ssh": stand.settings}, second.take_away, second.start


@contextmanager
def on_ray(tmp_path_factory):
    stand = RayStand()
    try:
        for name in ("n2", "n3"):
            stand.add(name)
        yield {"ray": {"address": stand.address}}, lambda: stand.kill("n2"), lambda: stand.add("n2")
    finally:
        stand.close()


@pytest.fixture(scope="module", params=["slurm", "ssh", "ray"])
def machines(request, tmp_path_factory):
    """A cluster's settings, what takes its second machine away, and what brings it back."""
    made = {"slurm": on_slurm, "ssh": on_ssh, "ray": on_ray}[request.param]
    with made(tmp_path_factory) as (section, take_away, again):
        config = ClusterConfig.model_validate(
            {
                "backend": request.param,
                "data": {"nodes": 2, "threads": 1},
                "retry": {"back_off_seconds": 0.5},
                "watch": {"hang_seconds": 120.0, "silent_node_seconds": limit(6.0)},
                **section,
            }
        )
        yield config, take_away, again


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", PARTS)
def test_two_machines_make_what_one_makes(machines, corpus, alone, tmp_path, stage):
    result, made = run_stage(stage, machines[0], corpus, tmp_path / "job")
    assert result.submissions == 1
    assert len(list((tmp_path / "job").glob("nodes/*/node.json"))) == 2, "two machines had a part in it"
    assert made == alone[stage]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", PARTS)
def test_a_machine_that_is_lost_costs_its_units_only(machines, corpus, alone, tmp_path, stage):
    config, take_away, again = machines
    folder, kept = tmp_path / "job", {}

    def lose():
        until(lambda: len(list(folder.glob(PARTS[stage]))) >= 3, 300)
        take_away()
        kept.update({path: path.stat().st_ino for path in folder.glob(PARTS[stage])})

    measured_again: list[Path] = []
    over = threading.Event()

    def look():
        while not over.wait(0.05):
            for path, inode in kept.items():
                try:
                    measured_again.extend([path] if path.stat().st_ino != inode else [])
                except FileNotFoundError:
                    return  # all parts were put together

    threads = [threading.Thread(target=each, daemon=True) for each in (lose, look)]
    for thread in threads:
        thread.start()
    try:
        result, made = run_stage(stage, config, corpus, folder)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        again()
    assert result.submissions >= 2 and kept, "the machine was lost while it worked"
    assert not measured_again
    assert made == alone[stage]
