"""Machines that share one job, of which the second can be lost and found again: of a real Slurm, of sshd, of a real Ray."""

import threading
from contextlib import contextmanager

from ray_stand import RayStand
from slurm_jobs import reachable
from slurm_stand import slurm
from ssh_stand import ssh_stand
from waiting import until


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
    """Of three machines Ray takes any two; what is lost is one of the job's, and not the head."""
    stand, lost = RayStand(), []

    def take_away():
        lost.append(next(name for name in ("n2", "n3") if stand.runs(name, "tasks.jobs.node")))
        stand.kill(lost[-1])

    def again():
        while lost:
            stand.add(lost.pop())

    try:
        for name in ("n2", "n3"):
            stand.add(name)
        yield {"ray": {"address": stand.address}}, take_away, again
    finally:
        stand.close()


STANDS = {"slurm": on_slurm, "ssh": on_ssh, "ray": on_ray}
"""By the backend's name: its section, what takes the second machine away, and what brings it back."""


@contextmanager
def losing_a_machine(folder, parts, take_away, *, after=3):
    """While a job runs in a folder: lose the machine once so many parts are there. Yields those, and those made anew."""
    kept, made_anew, over = {}, [], threading.Event()

    def lose():
        until(lambda: over.is_set() or len(list(folder.glob(parts))) >= after, 300)
        if not over.is_set():
            take_away()
            kept.update({path: path.stat().st_ino for path in folder.glob(parts)})

    def look():
        while not over.wait(0.05):
            for path, inode in list(kept.items()):
                try:
                    made_anew.extend([path] if path.stat().st_ino != inode else [])
                except FileNotFoundError:
                    return  # all parts were put together

    threads = [threading.Thread(target=each, daemon=True) for each in (lose, look)]
    for thread in threads:
        thread.start()
    try:
        yield kept, made_anew
    finally:
        over.set()
        for thread in threads:
            thread.join()
