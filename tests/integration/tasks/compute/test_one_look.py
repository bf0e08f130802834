"""One look at a scheduler serves every supervisor of a process, also those that start at the same moment."""

import threading
from pathlib import Path

from waiting import limit

from tasks.compute.job import JobState
from tasks.compute.polling import poller_of
from tasks.config.cluster import ClusterConfig


class Counting:
    """A scheduler that counts for how many jobs it is asked."""

    poll_seconds = 0.05

    def __init__(self):
        self.asked = []
        self.twice = threading.Event()

    def states(self, jobs):
        self.asked.append(len(jobs))
        if self.asked[-2:] == [2, 2]:
            self.twice.set()
        return [JobState(state="queued") for _ in jobs]


def test_supervisors_that_start_together_share_one_look_through_the_newest_backend():
    cluster = ClusterConfig.model_validate({"backend": "slurm", "slurm": {"partition": "of-this-test"}})
    older, newer = Counting(), Counting()
    pollers = [poller_of(backend, cluster) for backend in (older, newer)]
    with pollers[0].watching({}, Path("a")), pollers[1].watching({}, Path("b")):
        assert newer.twice.wait(limit(10))
    assert older.asked == []
    assert poller_of(Counting(), ClusterConfig.model_validate({"backend": "slurm"})) is not pollers[0]
