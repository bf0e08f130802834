"""`headway submit`: the supervisor for a program of the user's own: retries, bad nodes left out, logs, progress, metrics.

The program is told nothing of Headway but its job folder (HEADWAY_JOB); what it may write there is docs/compute.md, "A program of
your own". What stages submit is tasks/orchestration/stage_context.py.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import say
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.compute.job import Job
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig, backends_with
from tasks.orchestration.job_spec import shape
from tasks.security.audit import audit
from tasks.storage import open_store
from tasks.storage.manifest import Manifest
from tasks.storage.store import find


def submit(
    program: Annotated[Path, typer.Argument(help="A Python program, which finds what it needs on all machines.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Its own arguments.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines; without it, the configuration's.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes a machine; without it, the configuration's.")] = None,
    config: Config = None,
    backend: Annotated[str, typer.Option(help="Backend instead of the configuration's.")] = "",
    name: Annotated[str, typer.Option(help="What the job is called; without it, as the program's file.")] = "",
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=KIND/NAME[@VERSION]", help="An artifact that it reads; may be given often."
        ),
    ] = None,
    time_limit: Annotated[float | None, typer.Option(metavar="MINUTES", help="Longest time of one submission.")] = None,
    array: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="N jobs of their own, each with its HEADWAY_ARRAY_INDEX; Slurm only."),
    ] = 0,
    driver: Annotated[
        bool,
        typer.Option("--driver", help="It starts Ray's tasks and actors itself, by ray.init(); backend ray only."),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="A new job, although the same one is at work or was cut off.")
    ] = False,
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Run a program of your own on a backend, to its end: submitted once, retried when machines fail, adopted after a crash.

    The same program with the same arguments and settings, while one is at work, adopts that one.
    """
    from deployments.configuration.files import load_cluster

    overrides = [*(set_ or []), *_overrides(nodes, ranks, backend, time_limit)]
    cluster = load_cluster(config or "local", overrides)
    if driver and not cluster.capabilities.drivers:
        able = backends_with(lambda one: one.drivers)
        raise ValueError(f"--driver is for backend {able}, the backend is {cluster.backend}: leave it out")
    if array and not cluster.capabilities.arrays:
        able = backends_with(lambda one: one.arrays)
        raise ValueError(f"--array is for backend {able}, the backend is {cluster.backend}: leave it out")
    inputs = _inputs(input_ or [])
    job = job_of_program(
        program, tuple(arguments or ()), cluster, inputs, name=name, driver=driver, array=array, again=again
    )
    what = f"submit {job.id}: {program} on {cluster.backend}"
    with asked("run", as_, what=what):
        audit(open_store(home()), "submit job", right="run", what=what)
        from deployments.cli.cluster.submitted import run_and_tell

        fields, words = run_and_tell(job, cluster, inputs, ask=sys.stdin.isatty() and sys.stderr.isatty())
    say(fields, words, as_json=as_json)


def job_of_program(
    program: Path,
    arguments: tuple[str, ...],
    cluster: ClusterConfig,
    inputs: dict[str, Manifest],
    *,
    name: str = "",
    driver: bool = False,
    array: int = 0,
    again: bool = False,
) -> Job:
    """The job of a user's program. Its token is made of all that it runs with, so the same again is the same job.

    Raises ValueError for a program that is no file, or a secret in its arguments.
    """
    if not program.is_file():
        raise ValueError(f"there is no program {program}: give the path of a Python file")
    require_no_secrets({"arguments": list(arguments), "environment": cluster.environment})
    spec: dict[str, Any] = {
        "name": _job_name(name or program.stem),
        "program": str(program.resolve()),
        "module": False,
        "driver": driver,
        "array": array,
        "arguments": arguments,
        "settings": {},
        "inputs": {},
        "artifacts": {each: manifest.ref for each, manifest in inputs.items()},
        "nodes": 1 if driver else cluster.nodes,
        "ranks_per_node": 1 if driver else cluster.ranks_per_node,
        "threads_per_rank": cluster.threads_per_rank,
        "launcher": cluster.launcher,
        "elastic": cluster.elastic,
        **shape(cluster),
    }
    job = Job(**spec, token="")
    known = {**job.model_dump(mode="json", exclude={"token", "retry", "watch"}), "backend": cluster.backend}
    content = hashlib.sha256(program.read_bytes()).hexdigest()
    return job.model_copy(update={"token": digest([known, content, uuid.uuid4().hex if again else ""])[:32]})


def _overrides(nodes: int | None, ranks: int | None, backend: str, minutes: float | None) -> list[str]:
    given = {"nodes": nodes, "ranks_per_node": ranks, "backend": backend or None, "time_limit_minutes": minutes}
    return [f"cluster.{key}={value}" for key, value in given.items() if value is not None]


def _job_name(text: str) -> str:
    """A name that schedulers take: lower case letters, digits and dashes."""
    made = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")[:40]
    if not made:
        raise ValueError(f"{text!r} has no letter or digit: name the job, --name NAME")
    return made


def _inputs(given: list[str]) -> dict[str, Manifest]:
    """Artifacts by the name that the program knows them by. Raises ValueError, Unknown."""
    store, result = open_store(home()), {}
    for each in given:
        name, equals, ref = each.partition("=")
        if not (name and equals and ref):
            raise ValueError(f"--input {each!r} is not of the form NAME=KIND/NAME[@VERSION]")
        result[name] = find(store, *parse_ref(ref))
    return result
