"""`headway doctor`: what is missing or broken, and how to mend it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set
from deployments.cli.output import CommandError, say, visible
from deployments.services import prefect_server
from tasks.common.errors import HeadwayError, Missing, Refused
from tasks.common.home import home
from tasks.security.policy import in_force, load_policy
from tasks.storage import open_store
from tasks.storage.settings import load_stores

if TYPE_CHECKING:
    from tasks.config.cluster import ClusterConfig

# What `headway doctor` finds of the stores: the one that the home works in, and each in Azure that stores.yaml names.


def store_findings(home: Path) -> Iterator[Finding]:
    """Findings of all stores. A store in Azure is written to, because only a write tells whether it keeps versions."""
    try:
        stores = load_stores(home)
    except (HeadwayError, ValueError) as error:
        yield Finding("stores", False, str(error), getattr(error, "remedy", "") or "Correct the file that is named.")
        return
    healthy = True
    for name, config in stores.stores.items():
        if config.uri.startswith("az://"):
            from tasks.storage.blob.health import examine

            health = examine(config)
            healthy = healthy and (health.ok or name != stores.use)
            yield Finding(f"store {name}", health.ok, health.said, health.remedy)
    if healthy:  # else it would fail once more, after as long a wait
        yield _artifacts(home)


def _artifacts(home: Path) -> Finding:
    try:
        count = sum(1 for _ in open_store(home).manifests())
    except (HeadwayError, ValueError, OSError) as error:
        return Finding("store", False, str(error), getattr(error, "remedy", "") or "Restore the file that is named.")
    return Finding("store", True, f"{count} artifact(s)")


EXTRAS = {
    "orchestrator": ("prefect", "mlflow", "great_expectations", "matplotlib", "model_signing", "OpenSSL"),
    "cluster": ("torch", "transformers", "tokenizers", "safetensors", "onnx", "onnxruntime", "onnxruntime_genai"),
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


def doctor(config: Config = None, set_: Set = None, as_: As = "", as_json: Json = False) -> None:
    """Name what is missing or broken, and how to mend it; with -c, also of the backend that the configuration names."""
    findings = [*examine(home()), *(_backend(config or "local", set_ or [], as_) if config or set_ else ())]
    words = "\n".join(f"{'ok ' if f.ok else 'BAD'} {visible(f'{f.name:<22}{f.said}')}" + _arrow(f) for f in findings)
    fields: dict[str, Any] = {"findings": [asdict(finding) for finding in findings]}
    broken = [finding for finding in findings if not finding.ok]
    if not broken:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        print(words)

    text = "; ".join(f"{finding.name}: {finding.said}" for finding in broken)
    raise CommandError(Missing(text, remedy=" ".join(dict.fromkeys(f.remedy for f in broken))), fields)


BACKEND_INSTALL = "pip install -c constraints.txt -e '.[orchestrator]'"


def backend_findings(cluster: ClusterConfig) -> Iterator[Finding]:
    """What is found of a cluster's backend: its packages, its commands, whether its machines answer."""
    from tasks.compute import machines_of

    packages = cluster.capabilities.packages
    if missing := [package for package in packages if not _installed(package)]:
        yield Finding(f"backend {cluster.backend}", False, f"missing: {', '.join(missing)}", BACKEND_INSTALL)
        return
    if packages:
        yield Finding(f"backend {cluster.backend}", True, f"{', '.join(packages)} installed")
    yield from (Finding(*each) for each in machines_of(cluster).findings())


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


def _backend(config: str | list[str], overrides: list[str], as_: str) -> list[Finding]:
    """A configuration may name programs to connect with: that is as much as starting a run with it."""
    from deployments.configuration.files import load_cluster

    cluster = load_cluster(config, overrides)
    if cluster.capabilities.this_machine:
        return list(backend_findings(cluster))
    with asked("run", as_, what=f"look at the backend {cluster.backend}"):
        return list(backend_findings(cluster))


def examine(home: Path) -> Iterator[Finding]:
    """Everything that a run on this machine stands on."""

    yield _python()
    for extra, modules in EXTRAS.items():
        yield _packages(extra, modules)
    for package, ceiling in CEILINGS.items():
        yield _ceiling(package, ceiling)
    yield (writable := _writable(home))
    if not writable.ok:
        return
    yield _room(home)
    yield _policy(home)
    yield from store_findings(home)
    yield _server(home)
    yield from _sources(home)
    yield _worker(home)
    yield from _endpoints(home)


def _arrow(finding: Finding) -> str:
    return f"\n    -> {finding.remedy}" if not finding.ok else ""


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, sys.version.split()[0], "Headway needs Python 3.11 or newer.")


def _packages(extra: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    text = f"missing: {', '.join(missing)}" if missing else "installed"
    return Finding(f"extra {extra}", not missing, text, f"pip install -c constraints.txt -e '.[{extra}]'")


def _ceiling(package: str, ceiling: tuple[int, int]) -> Finding:
    """Versions that install and then do not work."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Finding(package, False, "missing", "pip install -c constraints.txt -e '.[orchestrator]'")
    parts = tuple(int(part) for part in installed.split(".")[:2])
    limit = ".".join(map(str, ceiling))
    return Finding(
        package, parts < ceiling, installed, f"Prefect 3.8 does not work with it: pip install '{package}<{limit}'"
    )


def _writable(home: Path) -> Finding:
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / ".probe").write_text("")
        (home / ".probe").unlink()
    except OSError as error:
        return Finding(
            "home", False, f"{home}: {error.strerror}", "Set HEADWAY_HOME to a folder that you may write to."
        )
    return Finding("home", True, str(home))


def _room(home: Path) -> Finding:
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    return Finding("disk", free >= NEEDED_GB, f"{free:.1f} GB free", f"Free room: {NEEDED_GB:.0f} GB are needed.")


def _policy(home: Path) -> Finding:
    try:
        load_policy(home)
    except Refused as error:
        return Finding("policy", False, error.message, error.remedy)
    return Finding("policy", True, in_force(home).words)


def _server(home: Path) -> Finding:
    server = prefect_server.status(home)
    return Finding("prefect server", True, server["url"] if server else "not running; the next run starts it")


def _sources(home: Path) -> Iterator[Finding]:
    from deployments.services import bridge

    for name, why in bridge.problems(home).items():
        yield Finding(f"events, {name}", False, why, "docs/events.md tells how each source is set up.")


def _worker(home: Path) -> Finding:
    from deployments.services import worker

    try:
        place = worker.temporary(home)
    except OSError as error:
        text = f"it cannot write its temporary files: {error.filename}: {error.strerror}"
        return Finding(
            "worker", False, text, "Delete that folder, or have its owner give it to you; then `headway up`."
        )
    return Finding("worker", True, f"its temporary files: {place}")


def _endpoints(home: Path) -> Iterator[Finding]:
    from tasks.serving.known import endpoint_of, known_endpoints

    for name in known_endpoints(home):
        try:
            served = endpoint_of(home, name).observe()
        except (HeadwayError, ValueError) as error:  # of a cloud
            yield Finding(f"endpoint {name}", False, str(error), getattr(error, "remedy", ""))
            continue
        text = f"{served.url} serves {served.model_ref[:40]}" if served else "stopped; the next retrain starts it"
        yield Finding(f"endpoint {name}", True, text)
