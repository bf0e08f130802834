"""`headway` alone: where this home is, what ran last, what is served, and what to do next.

Everything is read from files of the home: no server is asked, and nothing slow is imported. `headway status` tells more.
"""

from __future__ import annotations

import shlex
import sysconfig
import time
from pathlib import Path
from typing import Any

from deployments.cli.output import aligned, short_ref
from tasks.common.process import alive, read_json
from tasks.orchestration.run_log import LoggedRun, logged_runs

CONFIGURATION = "headway.yaml"
"""What `headway init` writes when no other file is named."""
SHIPPED = Path(__file__).parents[1] / "configs"
STDLIB = "python-stdlib"
"""A corpus that every machine has: the dataset of the shipped configuration `local`."""


def overview(home: Path, directory: Path) -> list[str]:
    """The lines of it. `directory` is where a configuration of the user's may lie."""
    run = next(logged_runs(home), None)
    endpoints = {path.parent.name: read_json(path) or {} for path in sorted(home.glob("endpoints/*/endpoint.json"))}
    facts = [("Home", str(home) if home.is_dir() else f"{home} (not made yet)")]
    if run:
        closed: dict[str, Any] = run.last("closed") or {}
        report = f"  {closed['report']}" if closed.get("report") else ""
        seconds = time.time() - (run.folder / "handle.json").stat().st_mtime
        units = (("d", 86400), ("h", 3600), ("min", 60))
        unit, size = next(((unit, size) for unit, size in units if seconds >= size), ("s", 1))
        what = f"{run.handle.get('flow')} of {run.handle.get('subject')}: {run.status.replace('_', ' ')}"
        facts += [("Last run", f"{what}, started {seconds / size:.0f} {unit} ago{report}")]
    paths = [] if elsewhere(home) else sorted(home.glob("store/documents/refs/*/champion.json"))
    facts += [("Champion", short_ref(ref)) for path in paths if (ref := (read_json(path) or {}).get("target"))]
    for name, record in endpoints.items():
        serves = alive(read_json(home / "endpoints" / name / "gateway" / "handle.json"))
        how = record.get("url", "running") if serves else "stopped, or on another machine"
        facts += [("Endpoint", f"{name}: {short_ref(str(record.get('model_ref', '')))}  {how}")]
    server = read_json(home / "prefect" / "server.json") or {}
    watch = alive(read_json(home / "platform" / "watch" / "handle.json"))
    login = home / "prefect" / "credentials"
    facts += [("Platform", f"up, {server.get('url', '')}   (login: {login})" if watch else "not up")]
    steps = next_steps(home, directory, run, list(endpoints), up=watch)
    lines = [line for command, purpose in steps for line in ("", f"  {purpose}:", f"    {command}")]
    return [*aligned(facts), "", "Next:", *lines[1:], "", "All commands: headway --help"]


def next_steps(
    home: Path, directory: Path, run: LoggedRun | None, endpoints: list[str], *, up: bool
) -> list[tuple[str, str]]:
    """Commands to run next, three at most, and what each is for."""
    mine = (directory / CONFIGURATION).is_file()
    datasets = sorted(home.glob("store/artifacts/dataset/*"), key=lambda path: path.stat().st_mtime)
    published = [path.name for path in reversed(datasets)]
    wanted = _names(directory / CONFIGURATION)[0] if mine else published[0] if published else STDLIB
    steps: list[tuple[str, str]] = []
    if run and run.waits:
        steps += [(f"headway approve {run.question}", "Answer what the run waits for")]
    elif run and run.status == "running":
        steps += [("headway status", "How far it is"), ("headway jobs", "Its jobs on their machines")]
    elif (
        run and run.status == "stopped" and not run.handle.get("command")
    ):  # the platform's, when `headway down` stopped it
        steps += [("headway up --detach", "Start the platform: it resumes what was stopped")]
    elif run and run.status == "cancelled":
        steps += [(_again(run, directory), "Continue it, reusing finished stages and checkpoints")]
        steps += [("headway jobs", "Whether a job of it still runs, by itself")]
    elif run and run.status != "completed":
        steps += [("headway doctor", "Whether anything is missing on this machine")]
        steps += [(_again(run, directory), "Start it again, reusing finished stages and checkpoints")]
    if wanted not in published and not elsewhere(home):
        steps += [] if mine else [("headway init", "Write a configuration, after three questions")]
        named = (
            f"the one that {CONFIGURATION} names"
            if mine
            else "the Python standard library, or NAME and PATH of your own"
        )
        steps += [(publishing(wanted), f"Make a dataset: {named}")]
    if not endpoints and not steps[2:] and not (run and run.status == "running"):
        steps += [(retraining(directory, wanted), "From the dataset to a served model")]
    for name in [name for name in endpoints if alive(read_json(home / "endpoints" / name / "gateway" / "handle.json"))][
        :1
    ]:
        steps += [(f"headway complete {name} 'TEXT'", "Ask the model")]
        steps += [(f"headway lineage endpoint/{name}", "What it was made from")]
    if not up and not any(command == "headway up --detach" for command, _ in steps):
        steps += [("headway up --detach", "Start the platform: schedules, pages, events")]
    return steps[:3]


def retraining(directory: Path, dataset: str, model: str = "") -> str:
    """The command that trains on a dataset, by the user's configuration, or by the shipped one that names it, or its model."""
    mine = directory / CONFIGURATION
    if dataset == STDLIB and not model and not mine.is_file():
        return "headway retrain"  # what `local` trains on: nothing is read for somebody who begins
    options = (
        {f" -c {CONFIGURATION}": mine}
        if mine.is_file()
        else {"": SHIPPED / "local.yaml", " -c tiny": SHIPPED / "tiny.yaml"}
    )
    for option, file in options.items():
        known, trained = _names(file)
        if model == trained or (dataset == known and not model) or mine.is_file():
            return f"headway retrain{option}" + (f" --dataset {dataset}" if dataset not in ("", known) else "")
    return f"headway retrain --dataset {dataset}" if dataset else "headway retrain"


def _names(file: Path) -> tuple[str, str]:
    """The dataset and the model that a configuration names; empty where it names none."""
    import yaml

    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
        return str(value.get("dataset", "")), str(value.get("training", {}).get("model", ""))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):  # the next command says what is wrong with it
        return "", ""


def _again(run: LoggedRun, directory: Path) -> str:
    """The command that continues a run: the one that it was started by, where that is known."""
    if command := run.handle.get("command"):
        return str(command)
    flow, subject = run.handle.get("flow"), str(run.handle.get("subject"))
    if flow == "retrain":
        dataset = str((run.last("closed") or {}).get("dataset") or "")
        return retraining(directory, dataset.removeprefix("dataset/").partition("@")[0], subject)
    return f"headway {flow} {subject}" if flow in ("revalidate", "validate") else f"headway {flow}"


def publishing(dataset: str, path: str = "") -> str:
    """The command that makes a dataset of a path; of the Python standard library where none is known."""
    if path:
        return f"headway dataset publish {dataset} {shlex.quote(path)}"
    if dataset == STDLIB:
        source = shlex.quote(sysconfig.get_path("stdlib"))
        return f"headway dataset publish {dataset} {source} --include '*.py' --exclude site-packages"
    return f"headway dataset publish {dataset} PATH"


def elsewhere(home: Path) -> bool:
    """Whether the home may work in a store outside of it: an answer from there may take seconds, or never come."""
    return (home / "stores.yaml").is_file()
