"""`headway rehearse` on machines of a real Slurm, of sshd and of a real Ray: what cannot be done there is not tried."""

import json
import subprocess
import threading
from contextlib import contextmanager

import pytest
import yaml
from ray_stand import RayStand
from slurm_jobs import reachable
from slurm_stand import slurm
from ssh_stand import ssh_stand
from waiting import limit

TRIED = ("answer-lost", "rank-killed", "launcher-killed", "machine-lost", "machine-off", "checkpoint-flipped")
LEFT_OUT = ("eviction-notice", "disk-full", "gpu-fails", "slow-rank", "clock-moved")
CLUSTER = {
    "nodes": 2,
    "ranks_per_node": 1,
    "retry": {"back_off_seconds": 0.5},
    "watch": {"hang_seconds": 300.0, "silent_node_seconds": limit(10.0)},
}
BENCHMARK = {"seconds": 0.2, "spare_nodes": 1, "checks": ["compute", "collectives"], "min_of_peers": 0}
ANY = {"name": "any", "vendor": "cpu", "sources": {}}
"""Hardware without limits: three machines share this one, and what a rate is on a busy day fails none of them."""


@contextmanager
def on_slurm(folder):
    with slurm(3, cpus=2) as stand, reachable(stand):
        yield {"slurm": {"requeue": False}}, stand.kill_node, stand.start_node


@contextmanager
def on_ssh(folder):
    with ssh_stand(folder / "ssh", count=3) as stand:
        by_name = {machine.address: machine for machine in stand.machines}
        yield {"ssh": stand.settings}, lambda name: by_name[name].take_away(), lambda name: by_name[name].start()


@contextmanager
def on_ray(folder):
    """The head takes no part in jobs: without it there is no cluster."""
    stand = RayStand(cpus=0)
    try:
        stand.cpus = 2
        for name in ("n2", "n3", "n4"):
            stand.add(name)
        yield {"ray": {"address": stand.address}}, stand.kill, stand.add
    finally:
        stand.close()


@contextmanager
def switched(folder, off, on):
    """Commands that switch a machine off and on: each leaves a file, and waits until it was done."""
    folder.mkdir()
    over = threading.Event()

    def serve():
        while not over.wait(0.05):
            for path in folder.glob("*-*"):
                how, _, name = path.name.partition("-")
                {"off": off, "on": on}[how](name)
                path.unlink()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield (
            f"touch {folder}/{how}-{{machine}}; while test -e {folder}/{how}-*; do sleep 0.1; done"
            for how in ("off", "on")
        )
    finally:
        over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("backend", "stand"), [("slurm", on_slurm), ("ssh", on_ssh), ("ray", on_ray)])
def test_what_a_cluster_allows_is_rehearsed_there(backend, stand, fresh):
    folder = fresh.path.parent
    with stand(folder) as (section, off, on), switched(folder / "switch", off, on) as (switch_off, switch_on):
        cluster = {"name": "stand", "backend": backend, **CLUSTER, **section}
        path = folder / "stand.yaml"
        hardware = folder / "any.yaml"
        hardware.write_text(yaml.safe_dump(ANY))
        benchmark = {**BENCHMARK, "sku": str(hardware), "collective_seconds": 600, "check_seconds": 1200}
        path.write_text(
            yaml.safe_dump({"cluster": cluster, "benchmark": benchmark, "planning": {"memory_per_rank_gib": 4}})
        )
        faults = (word for name in (*TRIED, *LEFT_OUT) for word in ("--only", name))
        switches = ("--switch-off", switch_off, "--switch-on", switch_on)
        words = (
            "rehearse",
            "-c",
            "tiny",
            "-c",
            path,
            *faults,
            *switches,
            "--set",
            "training.steps=480",
            "--json",
            "--keep",
        )
        ran = subprocess.run(
            fresh.command(*words),
            env=fresh.environment(),
            capture_output=True,
            text=True,
            timeout=limit(2400),
            check=False,
        )
    printed = json.loads(ran.stdout)
    assert "results" in printed, ran.stderr
    results = {one["name"]: one for one in printed["results"]}
    assert {name: one["verdict"] for name, one in results.items()} == {
        **dict.fromkeys(TRIED, "passed"),
        **dict.fromkeys(LEFT_OUT, "not tried"),
    }, ran.stderr
    assert all(results[name]["why"] for name in LEFT_OUT)
    assert ran.returncode == 0, ran.stderr
