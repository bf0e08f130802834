"""`headway doctor`: what is missing or broken, and how to fix it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import CommandError, extra_of, install, say, short_ref, visible
from deployments.services import prefect_server
from tasks.azure import rights as azure_rights
from tasks.common.errors import HeadwayError, Missing, Refused
from tasks.common.home import home
from tasks.security.policy import in_force, load_policy
from tasks.storage import open_store
from tasks.storage.settings import load_stores

if TYPE_CHECKING:
    from tasks.config.cluster import ClusterConfig


def store_findings(home: Path) -> Iterator[Finding]:
    """Findings of all stores. A store in Azure is written to, because only a write shows whether it keeps versions."""
    try:
        stores = load_stores(home)
    except (HeadwayError, ValueError) as error:
        yield Finding("stores", False, str(error), getattr(error, "remedy", "") or "Correct the file that is named.")
        return
    healthy = True
    for name, config in stores.stores.items():
        if config.uri.startswith("az://"):
            from tasks.storage.blob.versions import examine, examine_for_jobs

            health = examine_for_jobs(config) if name == stores.jobs else examine(config)
            healthy = healthy and (health.ok or name != stores.use)
            yield Finding(
                f"store {name}", health.ok, health.said, health.remedy, warned=health.ok and bool(health.remedy)
            )
    if healthy:  # else it would fail once more, after as long a wait
        try:
            count = sum(1 for _ in open_store(home).manifests())
        except (HeadwayError, ValueError, OSError) as error:
            remedy = getattr(error, "remedy", "") or "Restore the file that is named."
            yield Finding("store", False, str(error), remedy)
        else:
            yield Finding("store", True, f"{count} artifact(s)")


EXTRAS = {
    "orchestrator": ("prefect", "mlflow", "great_expectations", "model_signing", "OpenSSL"),
    "tracking": ("flask", "flask_wtf"),
    "report": ("matplotlib",),
    "train": ("torch", "transformers", "tokenizers", "safetensors"),
    "export": ("onnx", "onnxruntime", "onnxruntime_genai"),
    "serve": ("fastapi", "uvicorn"),
}
CEILINGS = {"fastapi": (0, 151), "sqlalchemy": (2, 1)}
NEEDED_GB = 3.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    said: str
    remedy: str = ""
    warned: bool = False
    """It works, and costs more than it must."""


def doctor(
    config: Config = None,
    set_: Set = None,
    rights: Annotated[
        bool,
        typer.Option(
            "--rights",
            help="Print the roles that the configuration needs in Azure, as a script of az commands; contact no service.",
        ),
    ] = False,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Report what is missing or broken and how to fix it; with -c, also for the backend that the configuration names."""
    if rights:
        uses = _used_of_azure(config or "azureml", set_ or [])
        needed = {"rights": [{**asdict(one), "command": one.command} for one in azure_rights.rights(uses)]}
        say(needed, azure_rights.script(uses).rstrip(), as_json=as_json)
        return
    findings = list(examine(home()))
    if config or set_:
        from tasks.config.files import load_cluster

        cluster = load_cluster(config or "local", set_ or [])
        if cluster.capabilities.this_machine:
            findings += backend_findings(cluster)
        else:  # it may name programs to connect with: that is as much as starting a run with it
            with asked("run", as_, what=f"look at the backend {cluster.backend}"):
                findings += backend_findings(cluster)
    words = "\n".join(
        f"{'!! ' if f.warned else 'ok ' if f.ok else 'BAD'} {visible(f'{f.name:<21} {f.said}')}"
        + (f"\n    -> {f.remedy}" if f.warned or not f.ok else "")
        for f in findings
    )
    fields: dict[str, Any] = {"findings": [asdict(finding) for finding in findings]}
    broken = [finding for finding in findings if not finding.ok]
    if not broken:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        print(words)

    text = "; ".join(f"{finding.name}: {finding.said}" for finding in broken)
    raise CommandError(Missing(text, remedy=" ".join(dict.fromkeys(f.remedy for f in broken))), fields)


def _used_of_azure(config: str | list[str], overrides: list[str]) -> azure_rights.Uses:
    """What a configuration uses of Azure. Raises ValueError when that is nothing, or has placeholders."""
    from tasks.config.files import load

    settings = load(config, overrides)
    cluster, served = settings.cluster, settings.served
    jobs, endpoint = cluster.section is cluster.azureml, bool(served.azureml.identity)
    if not (jobs or endpoint):
        raise ValueError(
            "--rights is for a configuration with cluster.backend azureml, or an endpoint's deployment.azureml.identity: name it "
            "with -c (docs/azureml.md)"
        )
    cluster.require_own()
    where = cluster.azureml if jobs else served.azureml
    stores = load_stores(home())
    name = where.store or stores.use
    if name not in stores.stores or not stores.stores[name].uri.startswith("az://"):
        raise ValueError(
            f"the store {name} is not on Azure Blob: set cluster.azureml.store to one of stores.yaml that is (docs/storage.md)"
        )
    return azure_rights.Uses(
        where=where,
        store=stores.stores[name].uri,
        jobs=stores.stores[stores.jobs].uri if stores.jobs else "",
        compute=cluster.azureml.compute if jobs else "",
        cluster_identity=cluster.azureml.cluster_identity if jobs else "",
        subnet=cluster.azureml.subnet if jobs else "",
        vnet=cluster.azureml.vnet if jobs else "",
        image=cluster.image if jobs else "",
        as_submitter=jobs and cluster.azureml.identity == "user",
        endpoint_identity=served.azureml.identity if endpoint else "",
        endpoint_image=served.azureml.image if endpoint else "",
        endpoint_scales=endpoint and served.azureml.most_instances > served.azureml.instances,
    )


def backend_findings(cluster: ClusterConfig) -> Iterator[Finding]:
    """What is found of a cluster's backend: its packages, its commands, whether its machines answer."""
    from tasks.benchmark import SAME_GPUS, gpu_mismatch
    from tasks.compute import machines_of

    packages, missing = cluster.capabilities.packages, []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the package above it is not there
            spec = None
        if spec is None:
            missing.append(package)
    if missing:
        yield Finding(
            f"backend {cluster.backend}", False, f"missing: {', '.join(missing)}", install(cluster.capabilities.extra)
        )
        return
    if packages:
        yield Finding(f"backend {cluster.backend}", True, f"{', '.join(packages)} installed")
    if text := gpu_mismatch(cluster):
        yield Finding("GPUs a machine", False, text, f"{SAME_GPUS[:1].upper()}{SAME_GPUS[1:]}.")
    machines = (Finding(*each) for each in machines_of(cluster).findings())
    yield from _installed_or_said(f"backend {cluster.backend}", machines)
    if not cluster.capabilities.shared_folder:
        yield from _installed_or_said("job folders", _job_folders(getattr(cluster.section, "store", "")))


def _job_folders(store: str) -> Iterator[Finding]:
    """What it costs that the folders of jobs lie beside artifacts; `jobs` of stores.yaml is looked at with the stores."""
    from tasks.storage import open_files
    from tasks.storage.blob.versions import JOBS_PAGE

    try:
        files = open_files(home(), store)
        if files.jobs is files and files.keeps_versions():
            text = f"they lie in {files.uri}, whose account keeps versions: rotated checkpoints stay, and are paid for"
            remedy = f"Name a store in an account without versioning as `jobs` of stores.yaml: {JOBS_PAGE}."
            yield Finding("job folders", True, text, remedy, warned=True)
    except (HeadwayError, ValueError):
        return  # the backend's own findings say what is wrong with the store


def examine(home: Path) -> Iterator[Finding]:
    """Everything that a run on this machine stands on."""
    yield from _installed()
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / ".probe").write_text("")
        (home / ".probe").unlink()
    except OSError as error:
        remedy = "Set HEADWAY_HOME to a folder that you may write to."
        yield Finding("home", False, f"{home}: {error.strerror}", remedy)
        return
    yield Finding("home", True, str(home))
    free = shutil.disk_usage(home).free / 1e9
    yield Finding("disk", free >= NEEDED_GB, f"{free:.1f} GB free", f"Free space: {NEEDED_GB:.0f} GB are needed.")
    try:
        load_policy(home)
    except Refused as error:
        yield Finding("policy", False, error.message, error.remedy)
    else:
        yield Finding("policy", True, in_force(home).words)
    yield from _installed_or_said("stores", store_findings(home))
    yield from _installed_or_said("platform", _services(home))
    yield from _installed_or_said("endpoints", _endpoints(home))


def _installed_or_said(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of one part. A package that is not installed ends that part alone, as a finding with the extra to install."""
    try:
        yield from findings
    except ModuleNotFoundError as error:
        yield Finding(name, False, f"missing: {error.name}", install(extra_of(error.name or "")))


def _services(home: Path) -> Iterator[Finding]:
    from deployments.services.parts import bridge, worker
    from deployments.services.starting import starting

    server = prefect_server.status(home)
    text = f"{server['url']}{prefect_server.login_of(home)}" if server else "not running; the next run starts it"
    if server and (age := starting(server)) is not None:
        text = f"starting, for {age:.0f} s so far: {server['url']} does not listen yet"
    yield Finding("prefect server", True, text)
    for name, why in bridge.problems(home).items():
        yield Finding(f"events, {name}", False, why, "See docs/events.md for how to set up each source.")
    try:
        place = worker.temporary(home)
    except OSError as error:
        text = f"it cannot write its temporary files: {error.filename}: {error.strerror}"
        remedy = "Delete that folder, or have its owner give it to you; then `headway up`."
        yield Finding("worker", False, text, remedy)
    else:
        yield Finding("worker", True, f"its temporary files: {place}")


def _installed() -> Iterator[Finding]:
    """Python, the packages of each extra, and versions that install and then do not work."""
    ok = sys.version_info >= (3, 11)
    yield Finding("python", ok, sys.version.split()[0], "Headway needs Python 3.11 or newer.")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        text = f"missing: {', '.join(missing)}" if missing else "installed"
        yield Finding(f"extra {extra}", not missing, text, install(extra))
    for package, ceiling in CEILINGS.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield Finding(package, False, "missing", install("orchestrator"))
            continue
        sound = tuple(int(part) for part in installed.split(".")[:2]) < ceiling
        limit = ".".join(map(str, ceiling))
        remedy = f"Prefect 3.8 does not work with it: pip install '{package}<{limit}'"
        yield Finding(package, sound, installed, remedy)


def _endpoints(home: Path) -> Iterator[Finding]:
    from tasks.serving.known import endpoint_of, known_endpoints

    for name in known_endpoints(home):
        try:
            served = endpoint_of(home, name).observe()
        except (HeadwayError, ValueError) as error:  # of a cloud
            yield Finding(f"endpoint {name}", False, str(error), getattr(error, "remedy", ""))
            continue
        text = f"{served.url} serves {short_ref(served.model_ref)}" if served else "stopped; the next retrain starts it"
        yield Finding(f"endpoint {name}", True, text)
