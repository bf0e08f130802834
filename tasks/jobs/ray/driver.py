"""The program of a Ray job: place one actor a machine, start the machines' parts of the job, and end with the leader's exit code.

`python -m tasks.jobs.ray.driver FOLDER` runs on the cluster, beside its head. It reads `ray.json` of the job folder
(tasks/compute/ray/backend.py writes it), and says in `ray-state.json` where the job is. What the cluster lacks,
and what runs on each machine, is agent.py. See docs/ray.md.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tasks.common.process import read_json, write_json
from tasks.jobs.ray.agent import NODE_ID, Agent, Machine, lacking, machines, selector, words

REPORT = "headway-report "
"""Begins the line of the driver's output that says why it ended, for whoever cannot read the job folder."""
POLL_SECONDS = 0.5
PLACE_SECONDS = 2.0
"""Time between two looks at a placement that waits."""
FOLLOW_SECONDS = 20.0
"""For the other machines to see that the leader has ended."""
LAST_FILES_SECONDS = 600.0
"""The same where each machine has a folder of its own, and sends what is left of it into the store."""
NO_STORE = 120
"""Exit code of a machine's part that cannot use that store, as in tasks/jobs/node/mirror.py."""


class Refused(Exception):
    """The job cannot go on; `report` is what is written to `errors/`."""

    def __init__(self, type_: str, message: str, class_: str, *, remedy: str = "", nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.report: dict[str, Any] = {
            "type": type_,
            "message": message,
            "remedy": remedy,
            "class": class_,
            "nodes": list(nodes),
        }


def make_agent(spec: dict[str, Any], group: Any, bundle: int) -> Any:
    """An actor that takes all of a bundle of a placement group, and is not started again when it dies."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    takes = spec["bundle"]
    return (
        ray.remote(Agent)
        .options(
            num_cpus=takes.get("CPU", 0),
            num_gpus=takes.get("GPU", 0),
            memory=takes.get("memory"),
            resources={kind: amount for kind, amount in takes.items() if kind not in ("CPU", "GPU", "memory")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            max_restarts=0,
        )
        .remote()
    )


class Driver:
    """One submission. State: the actors by node rank with their machines, how far it is, and whether somebody asked to stop."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.folder = folder
        self.spec = spec
        self.mirrored = bool(spec.get("mirrored"))
        self.agents: list[Any] = []
        self.places: list[Machine] = []
        self.started = False
        self.stopping = False

    def run(self) -> int:
        """From the placement to the leader's end. Raises Refused."""
        import ray

        if self.spec["driver"]:
            signal.signal(signal.SIGTERM, self._ask_to_stop)
            # A script of the user's own that joins the cluster by itself, beside this process. Exit code 0 is a
            # result.
            agent = Agent()
            agent.start(self.spec["commands"][0], self.spec["environment"])
            self.started = True
            self.say("running")
            while agent.poll() is None and not self.stopping:
                time.sleep(POLL_SECONDS)
            code = agent.stop() or _leader_code(self.folder)
            if code == 0 and not (self.folder / "result.json").exists():
                write_json(self.folder / "result.json", {"exit_code": 0})
            return code
        ray.init(log_to_driver=False, configure_logging=False)
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        group = self._place()
        self.say("starting", "Ray starts an actor on each machine")
        self._make_agents(group)
        if not self.mirrored:
            self._probe()
        self._start()
        self.say("running")
        try:
            # Until the leader ends, a machine is lost, or somebody asks to stop; the leader's exit code.
            ended: dict[int, int] = {}
            left: float | None = None
            while not self.stopping:
                ended |= self._look(ended)
                if refused := [self.places[rank].name for rank, code in ended.items() if code == NO_STORE]:
                    raise Refused(
                        "Missing",
                        f"{', '.join(refused)} cannot use the store of cluster.mirror: the log of the Ray worker there has the "
                        "store's answer",
                        "missing",
                        remedy="Grant the machine's identity Storage Blob Data Contributor on the container, or set "
                        "cluster.mirror.credential.",
                    )
                if 0 in ended and left is None:
                    left = time.monotonic() + (LAST_FILES_SECONDS if self.mirrored else FOLLOW_SECONDS)
                if len(ended) == len(self.agents) or (left is not None and time.monotonic() > left):
                    # a mirror ends with the code of what it ran; the mark of it may still be on its way to here
                    return ended[0] if ended[0] or self.mirrored else _leader_code(self.folder)
                time.sleep(POLL_SECONDS)
            return 1
        finally:
            # What does not answer dies with its actor when this process ends.
            ray.wait([agent.stop.remote() for agent in self.agents], num_returns=len(self.agents), timeout=40.0)

    def say(self, state: str, reason: str = "", **more: Any) -> None:
        """Where the job is, for the backend's `states`."""
        output = {"submission": self.spec["submission"], "state": state, "reason": reason, "time": time.time()}
        write_json(self.folder / "ray-state.json", {**output, **more})

    def _place(self) -> Any:
        """The placement group, once the cluster has room for it."""
        import ray
        from ray.util.placement_group import placement_group

        self._must_fit()
        where = selector(self.spec, machines(ray.nodes()))
        apart = [{NODE_ID: where}] * self.spec["nodes"] if where else None
        # A resource that only one machine has ties a node rank to it, where the machines were started with it.
        pin = self.spec["pin"]
        ties = [{f"{pin}-{rank}": 0.01} if pin else {} for rank in range(self.spec["nodes"])]
        bundles = [{**self.spec["bundle"], **tie} for tie in ties]
        group = placement_group(bundles, strategy=self.spec["strategy"], bundle_label_selector=apart)
        need = f"{self.spec['nodes']} machine(s) with {words(self.spec['bundle'])}"
        while not group.wait(PLACE_SECONDS):
            self.say("queued", f"waits for {need}: what the cluster has of it is in use")
            self._must_fit()
        return group

    def _must_fit(self) -> None:
        import ray

        lacks = lacking(self.spec, machines(ray.nodes()))
        if lacks and (self.spec["only"] or not self.spec["autoscales"]):
            raise Refused("ValueError", lacks, "user")

    def _make_agents(self, group: Any) -> None:
        import ray

        self.agents = [make_agent(self.spec, group, rank) for rank in range(self.spec["nodes"])]
        existing = {machine.id: machine for machine in machines(ray.nodes())}
        self.places = [existing[node] for node in ray.get([agent.where.remote() for agent in self.agents])]

    def _probe(self) -> None:
        """Every machine must see the job folder before anything starts."""
        import ray

        asked = (str(self.folder), self.spec["submission"], self.spec["shared_seconds"])
        seen = ray.get([agent.sees.remote(*asked) for agent in self.agents])
        blind = [place.name for place, sees in zip(self.places, seen, strict=True) if not sees]
        if blind:
            raise no_folder(self.folder, ", ".join(blind))

    def _start(self) -> None:
        import ray

        self.started = True
        for rank, (agent, place) in enumerate(zip(self.agents, self.places, strict=True)):
            who = {"HEADWAY_LEADER": self.places[0].address, "HEADWAY_NODE_NAME": place.name}
            ray.get(agent.start.remote(self.spec["commands"][rank], {**self.spec["environment"], **who}))

    def _look(self, ended: dict[int, int]) -> dict[int, int]:
        """Exit codes of the machines' parts that have ended since. Raises Refused for a machine that is lost."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

        result = {}
        asked = {rank: self.agents[rank].poll.remote() for rank in range(len(self.agents)) if rank not in ended}
        for rank, answer in asked.items():
            try:
                code = ray.get(answer, timeout=POLL_SECONDS * 4)
            except (ActorUnavailableError, GetTimeoutError):
                continue  # Ray itself decides when a machine that does not answer is dead
            except ActorDiedError as error:
                if 0 in ended:
                    result[rank] = 1  # it was lost after the job had ended
                    continue
                raise self._lost(rank, self.places[rank], error) from error
            if code is not None:
                result[rank] = code
        return result

    def _lost(self, rank: int, place: Machine, error: Exception) -> Refused:
        import ray

        alive = place.id in {machine.id for machine in machines(ray.nodes())}
        why = str(error).strip().splitlines()[-1].strip()
        if alive:
            return Refused("ActorDied", f"the actor of node rank {rank} on {place.name} died: {why}", "infrastructure")
        return Refused("NodeLost", f"Ray lost the node {place.name} ({place.address})", "node", nodes=(place.name,))

    def reason(self) -> str:
        """Why it ended, once `run` has returned."""
        if self.stopping:
            return "cancelled"
        return str((read_json(self.folder / "nodes" / "0" / "exit.json") or {}).get("reason", "ended"))

    def _ask_to_stop(self, *_: object) -> None:
        self.stopping = True
        if not self.started:
            sys.exit(128 + signal.SIGTERM)


def _leader_code(folder: Path) -> int:
    """How the leader's parent says that the submission ended; the parent itself always leaves with 0."""
    return int((read_json(folder / "nodes" / "0" / "exit.json") or {"code": 1})["code"])


def no_folder(folder: Path, who: str) -> Refused:
    return Refused(
        "Missing",
        f"the job folder {folder} is not to be seen on {who}: the machines of a Ray job and Headway must share it",
        "missing",
        remedy="Set HEADWAY_HOME to a folder on a file system that all of them mount under the same path.",
    )


def _report(folder: Path, refused: Refused) -> None:
    """Into the job folder, where it is there, and into the output."""
    attempt = int((read_json(folder / "attempt.json") or {"attempt": 1})["attempt"])
    output = {**refused.report, "attempt": attempt}
    if folder.is_dir():
        nodes = refused.report["nodes"]
        name = f"node-{nodes[0]}" if nodes else "driver"
        write_json(folder / "errors" / f"{name}.json", output)
    print(REPORT + json.dumps(output), flush=True)


def main(folder: Path) -> int:
    """Run a submission to its end; the exit code is the job's."""
    spec = read_json(folder / "ray.json")
    if spec is None:
        _report(folder, no_folder(folder, f"{socket.gethostname()}, where Ray runs the job's driver"))
        return 1
    from tasks.jobs.ray.elastic import ElasticDriver  # which imports this module

    driver = ElasticDriver(folder, spec) if "elastic" in spec else Driver(folder, spec)
    try:
        code = driver.run()
    except Refused as refused:
        _report(folder, refused)
        report = refused.report
        driver.say("ended", report["message"], code=1, failure=report["class"], failed_nodes=report["nodes"])
        return 1
    driver.say("ended", driver.reason(), code=code, failure=None, failed_nodes=[])
    return code


if __name__ == "__main__":
    # What elastic.py raises is this module's `Refused` under its own name, which `main` of `__main__` would not catch.
    from tasks.jobs.ray import driver

    sys.exit(driver.main(Path(sys.argv[1])))
