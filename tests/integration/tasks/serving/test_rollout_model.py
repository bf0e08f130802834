"""A model of rollouts: every deploy, measurement, kill and way back in any order, against the real steps, journal and traffic.

No server and no gateway runs here: what they would be is `World`, and what a kill cuts off is drawn by hypothesis. The same with
processes and sockets is test_rollout.py and test_rollback_kills.py.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.common.errors import GateFailed, JobFailed, Missing
from tasks.common.process import boot_id, process_started, read_json, write_json
from tasks.config.serving import RolloutConfig
from tasks.serving.journal import Journal, refused_models
from tasks.serving.local import rollout
from tasks.serving.local.rollout import LocalTraffic, ask_for_traffic_back, go_back
from tasks.serving.protocol.routes import read_routes, write_routes
from tasks.serving.rollout import AFTER, roll_out, settle, steps_of, take_over

STEPS = RolloutConfig(step_requests=50, least_seconds=0, step_seconds=20)
"""Of the deploys here: a mirrored step, 10, 50 and 100 %."""
SOUND = ("sound", "sound", "few")
"""Looks at a model that does nothing wrong: it answered enough, or has had too few requests yet."""
BAD = ("errors", "slow", "odd", "tripped", "gateway gone", "asked back")
"""Looks after which the traffic goes back."""
DEAF = "the gateway does not follow"
LATEST = 60
"""Effects of a rollout of four steps, before and after each, with a few to spare."""


class Killed(BaseException):
    """kill -9: nothing that comes after it is done."""


class World:
    """What there would be outside the process: servers, a gateway that carries traffic, files, a clock."""

    def __init__(self, endpoint: Path) -> None:
        self.endpoint = endpoint
        self.now = 1000.0
        self.running: set[str] = set()
        """Servers that run."""
        self.proven: set[str] = set()
        """Servers that answered every golden prompt."""
        self.gateway = False
        self.follows = True
        """Whether the gateway does what it is told."""
        self.carried: dict[str, int] = {}
        """Shares by server, as the gateway carries them."""
        self.applied = 0
        self.looks: list[str] = []
        """What is yet to be found, look by look; then everything is sound."""
        self.look, self.judged = "sound", []
        self.green, self.blue = "", ""
        self.ticks: int | None = None
        """Effects until the deployer is killed; None: it lives on."""
        self.dead = False
        self.steps: list[int] = []
        """Green's shares of this rollout, in their order."""

    def tick(self) -> None:
        """The deployer comes to a moment at which it may be killed."""
        self.now += 0.01
        if self.ticks is not None:
            self.dead = self.dead or self.ticks <= 0
            self.ticks -= 1
        if self.dead:
            raise Killed

    def lines(self):
        return Journal(self.endpoint / "journal.jsonl").lines()

    def carry(self, routes) -> None:
        """The gateway takes new shares: whoever gets one runs, and has proven itself."""
        shares = {colour.servers[0].server: colour.weight for colour in routes.colours.values()}
        assert sum(shares.values()) == 100
        self.carried, self.applied = shares, routes.number
        change = Journal(self.endpoint / "journal.jsonl").open_change()
        assert change is not None, "traffic is moved by a change of the journal, and by nothing else"
        green = Path(change.begun["green"]["folder"]).name
        line = change.lines[-1]
        if line["event"] == "step" and len(shares) == 2:
            assert shares[green] == line["weights"]["green"], "a share holds before the journal has it"
            self.steps += [shares[green]] if shares[green] not in self.steps[-1:] else []
        if line["event"] == "revert":
            assert not shares.get(green) or len(shares) == 1

    def stop(self, folder: Path) -> None:
        """A server is stopped: it has no traffic any more, and it is the old one only when the new one has all of it for good."""
        name = folder.name
        assert not self.carried.get(name) or len(self.carried) == 1 or not self.gateway, f"{name} is stopped under load"
        change = Journal(self.endpoint / "journal.jsonl").open_change()
        assert change is not None
        if change.begun["blue"] and name == Path(change.begun["blue"]["folder"]).name:
            assert change.committed, "the old server is stopped before the new one is there for good"
            assert read_json(self.endpoint / "endpoint.json")["folder"] == change.begun["green"]["folder"]
        else:
            assert not change.committed, "the new server is stopped after it was there for good"
        self.running.discard(name)


class FakeGateway:
    """The deployer's side of a gateway, without a process."""

    world: World

    def __init__(self, endpoint: Path) -> None:
        self.routes = endpoint / "routes.json"

    @property
    def running(self) -> bool:
        return self.world.gateway

    def start(self, settings) -> None:
        self.world.tick()
        if not self.world.gateway:
            self.world.gateway = True
            if routes := read_routes(self.routes):
                self.world.carry(routes)
        self.world.tick()

    def follow(self, routes) -> None:
        self.world.tick()
        write_routes(self.routes, routes)
        self.world.tick()
        if self.world.gateway:
            if not self.world.follows:
                raise Missing("the gateway does not follow: it does not answer")
            self.world.carry(routes)
        self.world.tick()

    def stop(self) -> None:
        self.world.tick()
        self.world.gateway = False
        self.world.carried = {}
        self.world.tick()

    def state(self):
        tripped = {"why": "it failed at once", "server": self.world.green} if self.world.look == "tripped" else None
        return {"applied": self.world.applied, "tripped": tripped}

    def observed(self, wanted):
        answers = [0.01] * 150
        green = {"requests": 150, "failures": 0, "seconds_per_token": answers, "measures": {"odd": [0.0] * 150}}
        blue = dict(green)
        changed = {
            "few": {"requests": 5, "seconds_per_token": answers[:5], "measures": {}},
            "errors": {"failures": 22},
            "slow": {"seconds_per_token": [0.05] * 150},
            "odd": {"measures": {"odd": [0.9] * 150}},
        }
        seen = {self.world.green: {**green, **changed.get(self.world.look, {})}, self.world.blue: blue}
        return {server: seen[server] for server in wanted if server in seen}


class Traffic(LocalTraffic):
    """The real traffic; before each look at both models something may happen."""

    world: World

    def asked_back(self):
        world = self.world
        world.tick()
        world.look = world.looks.pop(0) if world.looks else "sound"
        world.judged.append(world.look)
        if world.look == "asked back":
            assert ask_for_traffic_back(world.endpoint, "somebody saw something") is not None
        if world.look == "gateway gone":
            world.gateway, world.carried = False, {}
        if world.look == DEAF:
            world.follows = False
        return super().asked_back()


class TickingJournal(Journal):
    """A journal whose writer may be killed before and after each line."""

    def __init__(self, path: Path, world: World) -> None:
        super().__init__(path)
        self._world = world

    def write(self, event, **details):
        self._world.tick()
        super().write(event, **details)
        self._world.tick()


class Rollouts(RuleBasedStateMachine):
    """One endpoint over a long time. Whatever happened, the next start leaves exactly one model with all of the traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = Path(tempfile.mkdtemp()) / "tiny"
        self.endpoint.mkdir()
        self.world = World(self.endpoint)
        self.journal = TickingJournal(self.endpoint / "journal.jsonl", self.world)
        self.serves: str | None = None
        """The model in service, as the model of the test has it."""
        self.before: str | None = None
        """The one before it."""
        self.number = 0
        self.stopped = False
        """Whether somebody stopped the endpoint since the last change: then no server runs."""
        self.patches = pytest.MonkeyPatch()
        self.patch()

    def patch(self) -> None:
        """The world in the place of processes; files that count may be cut off by a kill, too."""
        world, put = self.world, self.patches.setattr

        class Ours(FakeGateway):
            pass

        Ours.world = world

        def told(path, value, **options):
            world.tick()
            write_json(path, value, **options)
            world.tick()

        def stop(folder):
            world.tick()
            world.stop(folder)
            world.tick()

        put(rollout, "write_json", told)
        put(rollout, "runs", lambda folder: folder.name in world.running)
        put(rollout, "Gateway", Ours)
        put(rollout, "stop_server", stop)
        put(rollout, "_me", dict)
        put(os, "fsync", lambda descriptor: None)
        put(rollout.process, "start", self._start_again)
        put(rollout, "await_ready", self._proves_itself)

    def _start_again(self, folder, spec):
        self.world.tick()
        self.world.running.add(folder.name)

    def _proves_itself(self, candidate, **_):
        self.world.tick()
        if candidate.folder.name not in self.world.proven:
            raise JobFailed("the old server is not ready", failure="infrastructure", folder=str(candidate.folder))

    def teardown(self) -> None:
        self.world.ticks, self.world.dead = None, False
        self.world.follows = True
        self.next_start()
        self.patches.undo()
        shutil.rmtree(self.endpoint.parent)

    # what happens

    def server(self) -> dict:
        """A new server that has answered every golden prompt, and its record."""
        self.number += 1
        name = f"s{self.number}"
        folder = self.endpoint / "servers" / name
        write_json(folder / "serve.json", {"port": 9000 + self.number})
        write_json(folder / "process.json", {"argv": []})
        self.world.running.add(name)
        self.world.proven.add(name)
        place = {"name": "tiny", "port": 8000, "url": "http://127.0.0.1:8000"}
        return {**place, "model_ref": f"model/tiny@{name}", "folder": str(folder)}

    def traffic(self) -> Traffic:
        traffic = Traffic(self.endpoint, self.journal.open_change().begun)
        traffic.world = self.world
        self.world.green = Path(traffic.green["folder"]).name
        self.world.blue = Path(traffic.blue["folder"]).name if traffic.blue else ""
        return traffic

    @rule(
        warm=st.sampled_from((0.0, 300.0)),
        looks=st.lists(st.sampled_from(SOUND), max_size=5),
        last=st.sampled_from((*BAD, DEAF, DEAF, "sound", "sound")),
        killed=st.one_of(st.none(), st.integers(0, LATEST)),
    )
    def deploy(self, warm, looks, last, killed):
        """A new model takes the traffic as far as measurements, people and kills let it."""
        self.next_start()
        self.world.running &= {self.serves, self.before}  # as LocalEndpoint.start does with strays
        blue = read_json(self.endpoint / "endpoint.json")
        colour = {"blue": "green", "green": "blue"}[blue["colour"]] if blue else "blue"
        green = {**self.server(), "colour": colour}
        config = {"keep_warm_seconds": warm, "max_error_share": 0.02, "gateway": {}}
        self.journal.begin(what="deploy", blue=blue, green=green, config=config)
        self.world.looks, self.world.judged, self.world.steps = [*looks, last], [], []
        traffic, name = self.traffic(), self.world.green
        in_steps = self.world.blue in self.world.running
        self.world.ticks = killed
        error = self.attempt(lambda: self.take_traffic(traffic, in_steps))
        self.world.ticks = None
        committed = any(line["event"] == "commit" for line in self.journal.last_change().lines)
        if in_steps:
            self.check_steps(error, committed)
        self.take_in(name, committed)
        if error is None or not (self.world.dead or DEAF in self.world.judged):
            assert (self.world.carried.get(name) == 100) is (error is None)
            assert (name in self.world.running) is (error is None)
            self.check_end()

    def take_traffic(self, traffic, in_steps):
        if in_steps:
            roll_out(traffic, STEPS, self.journal, pause=self.pause, clock=self.clock)
        else:
            take_over(traffic, self.journal)

    def check_steps(self, error, committed) -> None:
        """What a rollout did follows from what was seen, and from nothing else."""
        world, shares = self.world, [step.weights["green"] for step in steps_of(STEPS)]
        bad = [look for look in world.judged if look in BAD]
        assert world.steps == shares[: len(world.steps)], "shares come one after the other, and only grow"
        assert bad == world.judged[-1:] or not bad, "nothing more is looked at after a bad measurement"
        if error is None:
            assert committed and not bad and world.steps == shares
        elif isinstance(error, GateFailed):
            assert bad and not committed
        elif isinstance(error, Missing):
            assert DEAF in world.judged

    def pause(self, seconds: float) -> None:
        self.world.tick()
        self.world.now += seconds

    def clock(self) -> float:
        """Each question costs some of the step's time, so that a step with few requests ends as well."""
        self.world.now += 6
        return self.world.now

    def attempt(self, act):
        try:
            act()
        except (Killed, GateFailed, Missing, JobFailed) as error:
            return error
        return None

    def take_in(self, green: str, committed: bool) -> None:
        """What the test's own model holds from the journal's one rule: committed is forward, anything else is back."""
        if committed and green != self.serves:
            self.before, self.serves, self.stopped = self.serves, green, False

    @precondition(lambda self: self.before is not None)
    @rule(killed=st.one_of(st.none(), st.integers(0, 30)), gone=st.booleans())
    def roll_back(self, killed, gone):
        """A person goes back to the model before, which may have to be started again, and may not start any more."""
        self.next_start()
        record = read_json(self.endpoint / "endpoint.json")
        target = Path(record["previous"]["folder"]).name
        assert target == self.before
        if gone:
            self.world.proven.discard(target)
        self.world.ticks = killed
        old = self.serves
        error = self.attempt(
            lambda: go_back(self.endpoint, self.journal, reason="worse", taken=None, report=lambda event, details: None)
        )
        self.world.ticks = None
        change = self.journal.last_change()
        begun = change.begun["what"] == "rollback" and Path(change.begun["green"]["folder"]).name == target
        committed = begun and change.committed
        if isinstance(error, JobFailed):
            assert not committed and target not in self.world.proven
        self.take_in(target, committed)
        if gone and not committed:
            self.world.proven.add(target)  # mended
        if error is None:
            assert committed and refused_models(self.endpoint)[f"model/tiny@{old}"]["reason"] == "worse"
        if not self.world.dead:
            self.check_end()

    @precondition(lambda self: self.world.dead)
    @rule(killed=st.integers(0, 12))
    def a_start_that_is_killed_as_well(self, killed):
        """Whoever finishes or reverts what was left may be killed, too."""
        self.world.dead, self.world.ticks = False, killed
        if self.journal.open_change():
            with suppress(Killed, Missing):  # it may be deaf still
                settle(self.traffic(), self.journal)
        self.world.ticks = None

    @rule()
    def next_start(self):
        """Whoever comes next finishes or reverts what a deployer that died left, and then it is as if nobody had died."""
        self.world.dead, self.world.ticks, self.world.follows = False, None, True
        if self.journal.open_change():
            traffic = self.traffic()
            committed = self.journal.open_change().committed
            assert settle(traffic, self.journal) == ("done" if committed else "reverted")
            assert committed or self.world.green not in self.world.running or self.world.green == self.before
        self.check_end()

    @precondition(lambda self: self.journal.open_change() is None)
    @rule()
    def the_old_server_is_not_kept_any_longer(self):
        """The time for which it is kept warm is over."""
        self.world.running &= {self.serves}

    @precondition(lambda self: self.world.dead and self.world.gateway)
    @rule()
    def the_gateway_sees_that_the_deployer_died(self):
        """Ten seconds later it has given all of the traffic to the model in service, if it had to."""
        routes = read_routes(self.endpoint / "routes.json")
        main = routes.colours[routes.main].servers[0].server
        self.world.carried = {main: 100}

    @precondition(lambda self: self.serves and self.journal.open_change() is None)
    @rule()
    def somebody_stops_the_endpoint(self):
        """The gateway first, then all servers; the record stays."""
        self.world.gateway, self.world.carried, self.stopped = False, {}, True
        self.world.running.clear()

    # what holds

    def check_end(self) -> None:
        """Between two changes: one model has all of the traffic, and the record says so."""
        assert self.journal.open_change() is None
        record = read_json(self.endpoint / "endpoint.json")
        assert (Path(record["folder"]).name if record else None) == self.serves
        previous = (record or {}).get("previous")
        assert (Path(previous["folder"]).name if previous else None) == self.before
        if not self.serves:
            assert not self.world.carried
            return
        assert self.serves in self.world.running or self.stopped
        routes = read_routes(self.endpoint / "routes.json")
        shares = {colour.servers[0].server: colour.weight for colour in routes.colours.values() if colour.weight}
        assert shares == {self.serves: 100}
        if self.world.gateway:
            assert {name: share for name, share in self.world.carried.items() if share} == {self.serves: 100}
        assert not (self.endpoint / "abort.json").exists()

    @invariant()
    def only_sound_servers_have_traffic(self):
        """At any moment, also while a deployer lies dead."""
        assert sum(self.world.carried.values()) in (0, 100)
        for name, share in self.world.carried.items():
            sound = name in self.world.running and name in self.world.proven
            assert sound or not share or (self.stopped and name == self.serves), f"{name} has {share} %"

    @invariant()
    def the_old_server_stays_until_the_new_one_is_there_for_good(self):
        change = self.journal.open_change()
        if change and change.begun["blue"] and not change.committed and not self.stopped:
            assert Path(change.begun["blue"]["folder"]).name in self.world.running


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=30)


def test_whoever_finishes_a_rollout_again_does_not_make_the_stopped_model_the_way_back(tmp_path):
    """The gateway gives all of the traffic to `main` when the deployer dies: not to a server that the one before stopped."""
    records = {}
    for number, colour in enumerate(("blue", "green")):
        folder = tmp_path / "servers" / colour
        write_json(folder / "serve.json", {"port": 9000 + number})
        records[colour] = {"colour": colour, "port": 8000, "model_ref": f"model/tiny@{colour}", "folder": str(folder)}
    begun = {**records, "config": {"keep_warm_seconds": 0.0, "max_error_share": 0.02, "gateway": {}}}
    me = {"pid": os.getpid(), "started": process_started(os.getpid()), "boot_id": boot_id()}
    write_json(tmp_path / "servers" / "blue" / "handle.json", me)
    write_json(tmp_path / "endpoint.json", records["blue"])
    LocalTraffic(tmp_path, begun).set_traffic(AFTER)
    assert read_routes(tmp_path / "routes.json").main == "blue"
    (tmp_path / "servers" / "blue" / "handle.json").unlink()
    LocalTraffic(tmp_path, begun).promote()
    LocalTraffic(tmp_path, begun).set_traffic(AFTER)
    assert read_routes(tmp_path / "routes.json").main == "green"


def test_a_stopped_endpoint_that_is_rolled_back_never_gives_its_traffic_to_the_server_that_was_stopped(tmp_path):
    """Found by the model: the deployer died between the start of the gateway and the record."""
    records = {}
    for number, colour in enumerate(("blue", "green")):
        folder = tmp_path / "servers" / colour
        write_json(folder / "serve.json", {"port": 9000 + number})
        records[colour] = {"colour": colour, "port": 8000, "model_ref": f"model/tiny@{colour}", "folder": str(folder)}
    begun = {**records, "config": {"keep_warm_seconds": 0.0, "max_error_share": 0.02, "gateway": {}}}
    write_json(tmp_path / "endpoint.json", records["blue"])
    LocalTraffic(tmp_path, begun).set_traffic(AFTER)
    assert read_routes(tmp_path / "routes.json").main == "green"
