"""What the home's own records show of how models are made and served: the half of the audit that Azure does not see.

Of trainings it reads their folders: with what they trained, on how many machines, and how well. A folder that was deleted shows
nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.common.process import alive, read_json
from tasks.config.engines.registry import ENGINES
from tasks.registry.backup.snapshot import backups
from tasks.registry.qualifications import DAYS as QUALIFIED_DAYS
from tasks.registry.qualifications import Stored, stored
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, learnt_from, revalidations
from tasks.report.rehearsals import last_rehearsal
from tasks.security import audit_chain
from tasks.security.signatures import require_signed
from tasks.storage import open_named, open_store
from tasks.storage.settings import load_stores


@dataclass(frozen=True)
class Record:
    """Whether something is so (None: nothing shows it), and why."""

    holds: bool | None
    why: str
    applies: bool = True
    """Whether there is anything to judge at all."""


MOST_WAITING = 0.05
"""Share of a training's time that may go into waiting for data."""
LEAST_SCALING = 0.8
"""Share of a rank's tokens a second that more ranks may leave it, to be near linear."""
SMALL = 100_000_000
"""Parameters of a model that validates a workflow."""


@dataclass(frozen=True)
class Training:
    """One that ended."""

    name: str
    settings: dict[str, Any]
    execution: dict[str, Any]
    cluster: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def nodes(self) -> int:
        return int(self.cluster.get("nodes") or 1)

    @property
    def ranks(self) -> int:
        return self.nodes * int(self.cluster.get("ranks_per_node") or 1)


def trainings(home: Path) -> list[Training]:
    """All that ended, and whose folder is there."""
    result = []
    for path in sorted(home.glob("jobs/train-*/result.json")):
        job = read_json(path.parent / "job.json") or {}
        settings = job.get("settings") or {}
        if not settings.get("training"):
            continue
        ended, cluster = read_json(path) or {}, read_json(path.parent / "cluster.json") or {}
        result.append(
            Training(
                path.parent.name,
                settings["training"],
                settings.get("execution") or {},
                cluster,
                ended.get("metrics") or {},
            )
        )
    return result


def _of_trainings(home: Path, which: Callable[[Training], Any], so: str, *, else_: str) -> Record:
    """Met when one training is such; else it is a choice that nobody took, and not applicable."""
    each = trainings(home)
    if not each:
        return Record(None, "no folder of a training is there")
    such = [one.name for one in each if which(one)]
    return (
        Record(True, f"{so}: {', '.join(such[:5])}") if such else Record(None, f"{else_}: {len(each)}", applies=False)
    )


def _engine(name: str, home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: one.settings.get("engine") == name,
        f"trained with {name}",
        else_="trainings, all with another engine",
    )


def lora(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: (one.settings.get("lora") or {}).get("rank"),
        "trained with LoRA",
        else_="trainings, all of every weight",
    )


def offloading(home: Path) -> Record:
    """State that lies in the host's memory or on its disk, whatever engine put it there."""
    return _of_trainings(
        home,
        lambda one: any(
            isinstance(section, dict) and section.get("offload", "none") != "none" for section in one.execution.values()
        ),
        "offloaded",
        else_="trainings, all with their state on the GPU",
    )


def distributed(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: one.ranks > 1,
        "on several ranks",
        else_="trainings, each on one rank, which was enough",
    )


def nodes(home: Path) -> Record:
    return _of_trainings(
        home, lambda one: one.nodes > 1, "on several machines", else_="trainings, each on one machine, which was enough"
    )


def model_parallel(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: any(
            int(one.execution.get(f"{kind}_parallel") or 1) > 1 for kind in ("tensor", "pipeline", "context")
        ),
        "the network divided",
        else_="trainings, each with the whole network on a rank, which was enough",
    )


def scratch(home: Path) -> Record:
    """Machines with GPUs copy their data to their own disks."""
    of_gpus = [one for one in trainings(home) if one.cluster.get("gpus_per_node")]
    if not of_gpus:
        return Record(None, "no folder of a training on GPUs is there")
    without = [one.name for one in of_gpus if not (one.cluster.get("scratch") or one.cluster.get("mirror"))]
    return Record(not without, f"without: {', '.join(without)}" if without else f"all of {len(of_gpus)}")


def waiting_for_data(home: Path) -> Record:
    shares = {one.name: float(one.metrics["data_share"]) for one in trainings(home) if "data_share" in one.metrics}
    if not shares:
        return Record(None, "no training shows how long it waited")
    worst = max(shares, key=lambda name: shares[name])
    return Record(
        shares[worst] <= MOST_WAITING, f"{worst} waited {shares[worst]:.1%} of its time, the most of {len(shares)}"
    )


def scaling(home: Path) -> Record:
    """The same training on fewer and on more ranks of a cluster."""
    rates: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for one in trainings(home):
        if rate := one.metrics.get("tokens_per_second_per_rank"):
            key = [
                one.settings.get(name)
                for name in ("network", "engine", "precision", "sequence_length", "micro_batch_size")
            ]
            rates[str(one.cluster.get("name")), *map(str, key)][one.ranks] = float(rate)
    left = [of[max(of)] / of[min(of)] for of in rates.values() if len(of) > 1]
    if not left:
        return Record(None, "no training ran on fewer and on more ranks of a cluster")
    return Record(min(left) >= LEAST_SCALING, f"a rank among more did {min(left):.0%} of its work among fewer")


def small_model(home: Path) -> Record:
    sizes = {one.name: int(one.metrics["parameters"]) for one in trainings(home) if one.metrics.get("parameters")}
    if not sizes:
        return Record(None, "no training shows its size")
    least = min(sizes, key=lambda name: sizes[name])
    return Record(sizes[least] < SMALL, f"the smallest is {least}, of {sizes[least]:,} parameters")


def beating(home: Path) -> Record:
    """The supervisor looked at each machine while it trained."""
    each = trainings(home)
    if not each:
        return Record(None, "no folder of a training is there")
    silent = [one.name for one in each if not any(home.glob(f"jobs/{one.name}/nodes/*/beat"))]
    return Record(not silent, f"never looked at: {', '.join(silent)}" if silent else f"all of {len(each)}")


DAYS = 30
"""How old the last revalidation of a champion, and the last rehearsal, may be."""


def records(home: Path) -> dict[str, Record]:
    """Every record by its name. What cannot be read is not known."""
    if not home.is_dir():
        return {name: Record(None, f"there is no home {home}") for name in RECORDS}
    result = {}
    for name, look in RECORDS.items():
        try:
            result[name] = look(home)
        except (HeadwayError, ValueError, OSError) as error:
            result[name] = Record(None, f"it cannot be read: {error}")
    return result


def _champions(home: Path) -> dict[str, str]:
    """The champion of each model."""
    store = open_store(home)
    return {name: ref for name in champions(store) if (ref := read_ref(store, f"{name}/champion"))}


def _of_each(home: Path, wrong: Callable[[str, str], str], so: str) -> Record:
    """What holds of every champion; `wrong` says what does not hold of one, given its name and reference."""
    each = _champions(home)
    if not each:
        return Record(None, "no model has a champion")
    problems = [text for name, ref in each.items() if (text := wrong(name, ref))]
    return Record(not problems, "; ".join(problems) or f"{so}: {', '.join(each)}")


def signatures(home: Path) -> Record:
    """A signature that counts, of what the manifest says; `headway verify` reads the bytes too."""
    store = open_store(home)

    def wrong(name: str, ref: str) -> str:
        manifest = store.manifest(*parse_ref(ref))
        if manifest is None:
            return f"{name}: its manifest is gone"
        try:
            require_signed(store, home, manifest)
        except HeadwayError as error:
            return f"{name}: {error.message}"
        return ""

    return _of_each(home, wrong, "signed by a key that counts")


def drift(home: Path) -> Record:
    store, since = open_store(home), time.time() - DAYS * 86400

    def wrong(name: str, ref: str) -> str:
        lately = any(each["time"] >= since and each.get("champion") == ref for each in revalidations(store, name))
        return "" if lately else f"{name} was not revalidated in the last {DAYS} days"

    return _of_each(home, wrong, "revalidated")


def lineage(home: Path) -> Record:
    store = open_store(home)
    return _of_each(
        home, lambda name, ref: "" if learnt_from(store, ref) else f"{name} names no dataset", "the dataset is named"
    )


def qualification(home: Path) -> Record:
    """The newest one of each cluster counts."""
    newest: dict[str, Stored] = {}
    store = open_store(home)
    for one in stored(store):
        newest.setdefault(one.manifest.provenance.name, one)
    if not newest and any(True for _ in store.manifests("checkpoint")):
        return Record(False, f"models were trained, and no cluster was qualified in the last {QUALIFIED_DAYS:.0f} days")
    if not newest:
        return Record(None, f"no cluster was qualified in the last {QUALIFIED_DAYS:.0f} days")
    bad = [f"{name}: {one.verdict.verdict}" for name, one in newest.items() if one.verdict.verdict != "healthy"]
    return Record(not bad, "; ".join(bad) or f"healthy: {', '.join(newest)}")


def backup(home: Path) -> Record:
    """Backups in folders that stores.yaml names. That one was restored in a drill leaves no record."""
    stores = load_stores(home)
    folders = [
        name
        for name, one in stores.stores.items()
        if name != stores.use and not one.uri.startswith(("az:", "azureml:"))
    ]
    newest = [(name, made[0].provenance.created) for name in folders if (made := backups(open_named(home, name)))]
    if not newest:
        return Record(
            None, "no folder of stores.yaml has one; other stores were not asked, and a drill leaves no record"
        )
    return Record(None, f"{newest[0][0]} has one of {newest[0][1]}; a drill leaves no record: headway backup --drill")


def watch(home: Path) -> Record:
    if not (home / "platform").is_dir():
        return Record(None, "the platform has not run in this home")
    runs = alive(read_json(home / "platform" / "watch" / "handle.json"))
    return Record(True, "it runs") if runs else Record(None, "it does not run on this machine; it may on another")


def fallback(home: Path) -> Record:
    endpoints = {path.parent.name: read_json(path) or {} for path in sorted(home.glob("endpoints/*/endpoint.json"))}
    if not endpoints:
        return Record(None, "there is no endpoint")
    alone = [name for name, one in endpoints.items() if not (one.get("previous") or {}).get("model_ref")]
    return Record(not alone, f"none before it: {', '.join(alone)}" if alone else ", ".join(endpoints))


def store(home: Path) -> Record:
    stores = load_stores(home)
    config = stores.stores.get(stores.jobs or stores.use)
    uri = config.uri if config else "a folder of the home"
    return Record(uri.startswith("az://"), uri)


def resumed(home: Path) -> Record:
    for path in home.glob("jobs/*/result.json"):
        if (read_json(path) or {}).get("resumed_from_step") is not None:
            return Record(True, path.parts[-2])
    return Record(None, "no folder of a job shows one")


def rehearsed(home: Path) -> Record:
    """The newest rehearsal; what it could not try has not been shown."""
    last = last_rehearsal(home)
    if last is None:
        return Record(None, "there was no rehearsal in this home")
    age = datetime.now(UTC) - datetime.fromisoformat(last["began"])
    words = f"of {last['began'][:10]}: {last['passed']} passed, {last['failed']} failed, {last['not_tried']} not tried"
    if last["failed"] or last["broken"] or not last["passed"]:
        return Record(False, "; ".join([words, *last["broken"]]))
    return Record(True, words) if age.days < DAYS else Record(None, f"the last one is {age.days} days old: {words}")


def audit_log(home: Path) -> Record:
    checked = audit_chain.check(open_store(home))
    if checked.broken:
        return Record(False, f"the audit log is broken at entry {checked.broken.number}: {checked.broken.problem}")
    return Record(bool(checked.entries) or None, f"{checked.entries:,} entries, each with the hash of the one before")


def onnx(home: Path) -> Record:
    """Champions that ONNX Runtime can serve; others are served by vLLM."""
    store = open_store(home)
    manifests = {name: store.manifest(*parse_ref(ref)) for name, ref in _champions(home).items()}
    if not manifests:
        return Record(None, "no model has a champion")
    such = [
        name
        for name, one in manifests.items()
        if one and any(file.path.endswith(".onnx") for file in one.content.files)
    ]
    return Record(True, ", ".join(such)) if such else Record(None, "no champion is of ONNX", applies=False)


def _made(kind: str, home: Path) -> Record:
    """An artifact of a kind is there; where models were trained without one, that is wrong."""
    store = open_store(home)
    for one in store.manifests(kind):
        return Record(True, f"{kind}/{one.provenance.name}")
    trained = any(True for _ in store.manifests("checkpoint"))
    return Record(False if trained else None, f"there is no {kind}")


RECORDS: dict[str, Callable[[Path], Record]] = {
    **{
        each.__name__: each
        for each in (
            signatures,
            drift,
            lineage,
            qualification,
            backup,
            watch,
            fallback,
            store,
            resumed,
            rehearsed,
            audit_log,
            onnx,
            lora,
            offloading,
            distributed,
            nodes,
            model_parallel,
            scratch,
            waiting_for_data,
            scaling,
            small_model,
            beating,
        )
    },
    **{f"has_{kind}": partial(_made, kind) for kind in ("tokens", "plan", "evaluation")},
    **{f"engine_{name}": partial(_engine, name) for name in ENGINES},
}
