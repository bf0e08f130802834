"""One rehearsal: a home of its own, the lifecycle without a fault, then each fault with its verdict; and its report.

`HOME/rehearsals/ID/` keeps `report.json`, `report.html` and, with `keep`, the homes in which everything happened.
"""

from __future__ import annotations

import random
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, computed_field

from deployments.rehearsal.data import ArtifactFlipped, DataDrifted, SecretGiven, ShardPoisoned
from deployments.rehearsal.fault import Fault, check
from deployments.rehearsal.network import StoreLost, StoreRefuses, StoreSlow, WebhookForged
from deployments.rehearsal.runs import LostAnswer, OrchestratorKilled, PlatformKilled, PrefectKilled, TwoRuns
from deployments.rehearsal.scene import Moment, Scene
from deployments.rehearsal.serving import (
    CanaryFails,
    CanarySlow,
    CanaryWrong,
    KeyRevoked,
    ModelTampered,
    Overload,
    ServerKilled,
)
from deployments.rehearsal.training import (
    CheckpointFlipped,
    CheckpointTorn,
    ClockMoved,
    DiskFull,
    EvictionNotice,
    GpuFails,
    LauncherKilled,
    MachineLost,
    MachineOff,
    RandomFaults,
    RankHangs,
    RankKilled,
    SlowMachine,
)
from tasks.artifacts import Check, Value, parse_ref
from tasks.common.errors import HeadwayError, Unknown
from tasks.common.home import home
from tasks.common.process import read_json, write_json
from tasks.config.flows import RetrainConfig
from tasks.planning.money import discounts_of, hourly
from tasks.planning.prices.book import machine_price, open_book
from tasks.report.data import number
from tasks.report.pages import render, write_page
from tasks.storage.store import Store, find

FAULTS: tuple[type[Fault], ...] = (
    OrchestratorKilled,
    LostAnswer,
    TwoRuns,
    PrefectKilled,
    PlatformKilled,
    RankKilled,
    LauncherKilled,
    RankHangs,
    MachineLost,
    MachineOff,
    CheckpointFlipped,
    CheckpointTorn,
    EvictionNotice,
    DiskFull,
    GpuFails,
    SlowMachine,
    ClockMoved,
    StoreRefuses,
    StoreLost,
    StoreSlow,
    WebhookForged,
    ArtifactFlipped,
    ShardPoisoned,
    DataDrifted,
    SecretGiven,
    ServerKilled,
    Overload,
    CanaryFails,
    CanarySlow,
    CanaryWrong,
    KeyRevoked,
    ModelTampered,
)


SCHEMA = "headway/rehearsal/1"
STEPS, CHECKPOINTS = 240, 12
"""Steps of a training, unless --set training.steps says otherwise: enough to be interrupted; and checkpoints in it."""
MOST_BYTES = 100_000_000
"""Of a dataset: a rehearsal is about the chain, not about the data."""
SHIPPED, PACKAGES = ("tiny", "python-stdlib"), ("json", "email", "logging", "importlib")
"""Datasets of shipped configurations, and what stands for them in a home that has none."""
ENTRIES = "store/documents/audit/*.json"
"""The audit log, in a home with its own store."""
RANDOM = re.compile(r"random-(\d+)")
Verdict = Literal["passed", "failed", "not tried"]


class Result(Value):
    """What became of a fault."""

    name: str
    what: str
    promise: str
    page: str
    verdict: Verdict
    why: str = ""
    """Why it was not tried, or what did not come about."""
    seconds: float = 0.0
    moments: tuple[Moment, ...] = ()
    checks: tuple[Check, ...] = ()
    cost: float | None = None
    """What the machines cost from the fault until all was well again; None where they have no price, or nobody waited."""
    entries: int = 0
    """Entries of the audit log that were made meanwhile."""
    alerts: tuple[str, ...] | None = None
    """Alerts that fired at its end; None where the platform's watch did not run, which raises them."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def to_notice(self) -> float | None:
        """Seconds from the fault to the first sign that it was noticed."""
        return self._after("noticed")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def to_recover(self) -> float | None:
        """Seconds from the fault to the moment when all was well again."""
        return self._after("recovered")

    def _after(self, kind: str) -> float | None:
        return after(self.moments, kind)


def after(moments: Sequence[Moment], kind: str) -> float | None:
    """Seconds from the first injected fault to the first moment of a kind."""
    injected = next((one.seconds for one in moments if one.kind == "injected"), None)
    first = next((one.seconds for one in moments if one.kind == kind), None)
    return None if injected is None or first is None else round(first - injected, 2)


class Report(Value):
    """A rehearsal as `report.json` keeps it."""

    schema_: str = Field(SCHEMA, alias="schema")
    id: str
    began: datetime
    seconds: float = 0.0
    backend: str
    configuration: tuple[str, ...]
    dataset: str
    seed: int
    undisturbed_seconds: float = 0.0
    hour: float | None = None
    """What an hour of all machines of a training costs; None: they have no price."""
    currency: str = ""
    results: tuple[Result, ...] = ()
    invariants: tuple[Check, ...] = ()

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict == verdict for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something was tried: what was not tried has not passed."""
        return not self.count("failed") and bool(self.count("passed")) and all(one.passed for one in self.invariants)


def chosen(names: Sequence[str], *, quick: bool) -> list[Fault]:
    """The faults of these names, where `random-7` is one, or all of FAULTS; `quick` leaves out the long ones. Raises Unknown."""
    if not names:
        return [fault() for fault in FAULTS if fault.quick or not quick]
    known = {fault.name: fault for fault in FAULTS}
    strangers = [name for name in names if name not in known and not RANDOM.fullmatch(name)]
    if strangers:
        raise Unknown(f"there is no fault {strangers[0]!r}", remedy=f"Name one of: {', '.join(known)}, random-NUMBER.")
    seeds = [int(drawn[1]) for name in names if (drawn := RANDOM.fullmatch(name))]
    return [*(fault() for fault in FAULTS if fault.name in names), *map(RandomFaults, seeds)]


def require_rehearsable(settings: RetrainConfig) -> None:
    """Raise ValueError where a rehearsal would reach what is in production."""
    cluster = settings.cluster
    if not cluster.jobs_see_home:
        raise ValueError(
            f"machines of cluster.backend {cluster.backend} do not share Headway's home with this one, as it is configured: a "
            "rehearsal reads and damages the files of its jobs there, and nothing was injected. Name a configuration whose "
            "machines share the home, or add --set cluster.backend=local"
        )
    if cluster.elastic:
        raise ValueError(
            "cluster.elastic is set, and a rehearsal compares trainings of one size: add --set cluster.elastic=null"
        )
    if settings.deployment.backend != "local":
        raise ValueError(
            f"deployment.backend is {settings.deployment.backend}: rehearsals serve on this machine. "
            "Add --set deployment.backend=local"
        )
    if settings.deployment.port:
        raise ValueError(
            f"deployment.port is {settings.deployment.port}, which the endpoint of the rehearsal would take from yours: "
            "add --set deployment.port=null"
        )


class Words(NamedTuple):
    """The options of every run, and the settings among them."""

    words: tuple[str, ...]
    settings: list[str]


def settings_words(names: Sequence[str], settings: Sequence[str]) -> Words:
    """What runs of a rehearsal are called with: a configuration, and a training that is long enough to be interrupted."""
    long_enough = [] if any(one.startswith("training.steps=") for one in settings) else [f"training.steps={STEPS}"]
    every = [*long_enough, *settings]
    words = (*(word for name in names for word in ("-c", name)), *(word for one in every for word in ("--set", one)))
    return Words(words, every)


def sources_of(store: Store, dataset: str, folder: Path) -> tuple[str, ...]:
    """The words that publish the data of a rehearsal: the first shards of a dataset, up to MOST_BYTES, copied into a folder.

    Where the home has no dataset and a shipped configuration is named, it is a part of Python's standard library. Raises
    Unknown when there is none of this name.
    """
    try:
        manifest = find(store, *parse_ref(dataset, kind="dataset"))
    except Unknown:
        if dataset not in SHIPPED:
            raise
        library = Path(sysconfig.get_path("stdlib"))
        return (*(str(library / name) for name in PACKAGES), "--include", "*.py")
    names, size = list[str](), 0
    for file in manifest.content.files:
        if names and size + file.size > MOST_BYTES:
            break
        names.append(file.path)
        size += file.size
    folder.mkdir(parents=True)
    store.copy_files(manifest, names, folder)
    return (*(str(folder / name) for name in names), "--text-field", "")


def rehearse(
    folder: Path,
    words: Sequence[str],
    settings: RetrainConfig,
    sources: tuple[str, ...],
    faults: Sequence[Fault],
    *,
    seed: int,
    progress: Callable[[str], None],
    keep: bool = False,
    hours: float = 0.0,
    switch: tuple[str, str] = ("", ""),
) -> Report:
    """Run the lifecycle and inject the faults, one after the other.

    `progress` takes a line of progress, `switch` are commands that switch a machine of the cluster off and on.
    """
    began = time.monotonic()
    report = Report(
        schema=SCHEMA,
        id=folder.name,
        began=datetime.now(UTC),
        backend=settings.cluster.backend,
        configuration=tuple(words),
        dataset=settings.dataset,
        seed=seed,
    )
    hour, currency = price_of(settings)
    report = report.model_copy(update={"hour": hour, "currency": currency})
    steps = settings.training.steps
    interval = max(1, steps // CHECKPOINTS)
    own = {
        "dataset": "rehearsal",
        "training.model": "rehearsal",
        "deployment.endpoint": "rehearsal",
        "planning.checkpoint.every_steps": interval,
        **dict.fromkeys(("approval.before_train", "approval.before_deploy"), "false"),  # nobody is there to answer
        "deployment.access": "{}",  # on loopback, and without keys until a fault makes some
    }
    every = (*words, *(word for name, value in own.items() for word in ("--set", f"{name}={value}")))
    names = ("rehearsal", "rehearsal", sources, interval, random.Random(seed), progress)
    scene = Scene(folder / "home", every, *names, settings.cluster, *switch)
    scene.home.mkdir(parents=True)
    try:
        progress("the lifecycle without a fault ...")
        scene.publish()
        scene.sound = scene.lifecycle()
        progress(f"the lifecycle without a fault took {scene.sound.seconds:.0f} s")
        report = report.model_copy(update={"undisturbed_seconds": round(scene.sound.seconds, 1)})
        for at, fault in enumerate(each_fault(faults, seed=seed, hours=hours)):
            of = f" of {len(faults)}" if at < len(faults) else ""
            progress(f"{at + 1}{of}  {fault.name} ...")
            result = try_fault(fault, scene, hour)
            report = report.model_copy(update={"results": (*report.results, result)})
            progress(line_of(result))
        progress("the invariants ...")
        report = report.model_copy(update={"invariants": tuple(invariants(scene))})
    finally:
        scene.close()
        report = report.model_copy(update={"seconds": round(time.monotonic() - began, 1)})
        write_json(folder / "report.json", report.model_dump(mode="json", by_alias=True))
        write_page(folder / "report.html", render("rehearsal", report=report, title="Rehearsal"))
        if not keep:
            for made in [path for path in folder.iterdir() if path.is_dir()]:
                shutil.rmtree(made, ignore_errors=True)
    return report


def each_fault(faults: Sequence[Fault], *, seed: int, hours: float) -> Iterator[Fault]:
    """The faults that were chosen, then random ones until the hours are over: those of `seed`, `seed` + 1 and so on."""
    yield from faults
    began = time.monotonic()
    while time.monotonic() - began < hours * 3600:
        yield RandomFaults(seed)
        seed += 1


def price_of(settings: RetrainConfig) -> tuple[float | None, str]:
    """What an hour of all machines of a training costs, by the price lists of this home, and the currency."""
    paid, cluster = settings.planning.spending, settings.cluster
    if not cluster.size:
        return None, ""
    price = machine_price(open_book(home()), cluster.size, region=paid.region, today=datetime.now(UTC).date())
    hour = hourly(price, {paid.price: 1.0}, discounts_of(paid))
    return (None if hour is None else hour * cluster.nodes), price.currency


def try_fault(fault: Fault, scene: Scene, hour: float | None = None) -> Result:
    """Inject one fault, and judge it. An error of the fault itself is a failure, with its words.

    `hour` is what all machines cost an hour.
    """
    known = {"name": fault.name, "what": fault.what, "promise": fault.promise, "page": fault.page}
    alone = "" if scene.cluster.capabilities.this_machine else fault.local_only
    if why := alone or fault.impossible(scene):
        return Result(**known, verdict="not tried", why=why)
    scene.begin()
    entries = len(scene.known(ENTRIES))
    checks, why = list[Check](), ""
    try:
        fault.inject(scene)
        checks = list(fault.expect(scene))
    except Exception as error:  # noqa: BLE001 whatever it is, the faults after it are tried
        why = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    finally:
        scene.clean()
        try:
            fault.undo(scene)
        except Exception as error:  # noqa: BLE001 one that did not come about may have nothing to undo
            why = why or f"what the fault did could not be undone: {error}"
    waited = after(scene.moments, "recovered")
    good = not why and bool(checks) and all(one.passed for one in checks)
    return Result(
        **known,
        verdict="passed" if good else "failed",
        why=why,
        seconds=round(time.monotonic() - scene.began, 1),
        moments=tuple(scene.moments),
        checks=tuple(checks),
        cost=None if hour is None or waited is None else round(hour * waited / 3600, 4),
        entries=len(scene.known(ENTRIES)) - entries,
        alerts=fault.alerts,
    )


def line_of(result: Result) -> str:
    """One fault, as a line of progress."""
    parts = [f"{result.name:<21}{result.verdict:<10}"]
    parts += [f"{result.seconds:5.0f} s"] if result.verdict != "not tried" else []
    parts += [f"noticed after {result.to_notice:.1f} s"] if result.to_notice is not None else []
    parts += [f"recovered after {result.to_recover:.1f} s"] if result.to_recover is not None else []
    wrong = [f"{one.name}: {number(one.measured)}, not {one.limit}" for one in result.checks if not one.passed]
    return "  ".join([*parts, *([result.why] if result.why else []), *wrong])


def invariants(scene: Scene) -> Iterator[Check]:
    """What no fault may have done, looked at when all are over."""
    open_at_once = list(scene.two_at_work())
    yield check("jobs with two open submissions", ", ".join(open_at_once) or "none", "none", not open_at_once)
    verified = scene.run("verify")
    yield check("every byte, record, ref and the audit log", verified.summary(), "exit code 0", verified.code == 0)
    served = read_json(scene.endpoint_folder / "endpoint.json") or {}
    signed = scene.run("verify", served.get("model_ref", ""))
    yield check("the served model and its signature", signed.summary(), "exit code 0", signed.code == 0)
