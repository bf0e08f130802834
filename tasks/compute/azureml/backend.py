"""The Azure ML backend: command jobs of a workspace, whose folders lie in the Blob store.

What is submitted is render.py, the door to the service client.py, and the job folder ../job_folder.py. On each machine runs
tasks/jobs/node/mirror.py. See docs/azureml.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.azure import arm_client
from tasks.azure.arm_client import QUOTA
from tasks.common.errors import HeadwayError, IntegrityError, JobFailed, Missing
from tasks.common.process import read_json, write_text
from tasks.compute.azureml.client import Workspace
from tasks.compute.azureml.render import CODED, FOLDER_KEY, OURS, SERVERLESS, Rendering, job_name, rendering, rest
from tasks.compute.job import Failure, Job, JobState, Rendered, before_submission
from tasks.compute.job_folder import Files, Folders, code_name, key_of, missing_output, prefix_of, write_code
from tasks.compute.nodes import Finding, Machines, ended_state, network_finding
from tasks.config.cluster import ClusterConfig

# What Azure ML says of a job, as ours: its states, and the classes of its errors. Pure.
#
# The states are those of the service's JobStatus; the codes are read in the run history. An image that is built and
# nodes that boot are no hang: they are `starting`, with the service's word as the reason.


QUEUED = ("NotStarted", "Queued")
STARTING = ("Starting", "Provisioning", "Preparing")
RUNNING = ("Running", "Finalizing", "CancelRequested", "Paused", "NotResponding")
"""NotResponding: the service's own agent is silent; the job may well run, and its marks and heartbeats tell."""
OVER = ("Completed", "Failed", "Canceled")

CAUSES: tuple[tuple[re.Pattern[str], Failure, str], ...] = (
    (re.compile(r"preempt|evict|low.?priority.*(lost|taken|unavailable)", re.I), "preempted", ""),
    (QUOTA, "missing", "Ask for quota in the studio, or set azureml.compute to a cluster of another size or tier."),
    (
        re.compile(r"(image|manifest).*(not.?found|unknown|pull)|ImagePull|pull.*image", re.I),
        "user",
        "Look at cluster.image.",
    ),
    (re.compile(r"ImageBuild|environment.*(build|fail)|build.*image", re.I), "user", "Look at azureml.environment."),
    (re.compile(r"(time.?out|exceeded.*(duration|time)|MaxRunDuration)", re.I), "timeout", ""),
    (re.compile(r"OutOfMemory|out of memory|OOMKill|exit code 137", re.I), "out_of_memory", ""),
    (re.compile(r"node.*(unhealthy|unusable|lost|failed)|NodeFailure|DiskFull", re.I), "node", ""),
)
"""Read from the first on: pattern in the service's codes and messages, class, remedy."""
SILENT: tuple[tuple[re.Pattern[str], Failure, str], ...] = (
    (
        re.compile(r"status code 6\b"),
        "missing",
        "A node could not use the store: `headway doctor --rights` prints the roles that the cluster's identity needs.",
    ),
    (
        re.compile(r"status code 2\b"),
        "user",
        "A node did not understand its command: cluster.image has to hold the release of Headway that submits.",
    ),
)
"""The same for a job whose nodes left no mark in its folder: exit codes of tasks/jobs/node/mirror.py."""


def state_of(result: dict[str, Any] | None, why: dict[str, Any], folder: Path, log_line: str = "") -> JobState:
    """A job's state: what the service says of it, and how its leader said that it ended. `folder` is up to date.

    `result` None: an administrator deleted it. `why` is the run history's error of one that failed, `log_line` the last line of
    a node's log.
    """
    if result is None:
        return JobState(state="lost", reason="Azure ML has no job of this name any more: somebody deleted it")
    status = str(result["properties"].get("status") or "Unknown")
    if status in QUEUED:
        return JobState(state="queued", reason=status)
    if status in STARTING:
        return JobState(state="starting", reason=status)
    if status in RUNNING:
        return JobState(state="running", reason="" if status == "Running" else status)
    if status not in OVER:
        return JobState(state="unknown", reason=f"Azure ML says {status}")
    marked = ended_state(folder)
    attempts = marked.attempts if marked else 1
    if status == "Completed":
        return marked or JobState(state="ended", code=0, reason="ended")
    if status == "Canceled":
        return JobState(state="ended", code=1, reason="cancelled", attempts=attempts, failure="cancelled")
    output = words(why)
    if marked and marked.reason == "cancelled":
        # The service stopped this node because another one had failed: who cancels a job leaves it Canceled.
        marked = None
    silent = marked is None and not any(folder.glob("errors/*.json"))
    cause, remedy = cause_of(output, (*SILENT, *CAUSES) if silent else CAUSES)
    if marked and cause not in ("preempted", "node", "missing"):
        return marked if marked.code else JobState(state="ended", code=1, reason=output or status, attempts=attempts)
    log_line = f"Its log ends with: {log_line}" if log_line else ""
    reason = " ".join(part for part in (output or "Azure ML says Failed, and not why", log_line, remedy) if part)
    return JobState(state="ended", code=1, reason=reason, attempts=attempts, failure=cause, failed_nodes=())


def cause_of(text: str, causes: Sequence[tuple[re.Pattern[str], Failure, str]] = CAUSES) -> tuple[Failure, str]:
    """The class of what the service said, and what a person can do."""
    for pattern, cause, remedy in causes:
        if pattern.search(text):
            return cause, remedy
    return "infrastructure", ""


def words(why: dict[str, Any]) -> str:
    """All codes of an error, from the outermost to the innermost, and its message."""
    codes, inner = [], why
    while inner:
        codes.append(str(inner.get("code") or ""))
        inner = inner.get("innerError") or inner.get("inner_error") or {}
    messages = [*dict.fromkeys(filter(None, codes))]
    message = str(why.get("message") or "").strip()
    return ": ".join(part for part in ("/".join(messages), message) if part)[:600]


logger = logging.getLogger("headway.azureml")


class AzureMlMachines(Machines):
    """The nodes of a workspace's compute cluster, which Azure ML chooses by itself."""

    def findings(self) -> Iterator[Finding]:
        yield from azureml_findings(self.config)


def azureml_findings(config: ClusterConfig) -> Iterator[Finding]:
    """Findings: the store first, then the workspace and its cluster."""
    try:
        config.require_own()
    except ValueError as error:
        yield (
            "azureml settings",
            False,
            str(error),
            "Write a file with your own values, and name it after this one: -c FILE.",
        )
        return
    own = any(name.startswith("NCCL_") for name in config.environment)
    if config.gpus_per_node and config.azureml.size and not own:
        remedy = (
            "Correct cluster.azureml.size, or set that size's NCCL variables in cluster.environment, as NCCL_DEBUG."
        )
        yield network_finding("azureml size", config.azureml.size, remedy)
    try:
        backend = AzureMlBackend(config, arm_client.open_files)
    except (HeadwayError, ValueError) as error:
        yield "azureml store", False, str(error), getattr(error, "remedy", "") or "See docs/azureml.md."
        return
    yield "azureml store", True, f"job folders lie in {backend.store}", ""
    name = config.azureml.compute
    try:
        size = backend.require_cluster(config.nodes, preemptible=config.preemptible)
    except (HeadwayError, ValueError) as error:
        yield "azureml compute", False, str(error), getattr(error, "remedy", "") or "Correct cluster.azureml."
        return
    what = "machines come by themselves" if name == SERVERLESS else f"{name} ({size}) is there"
    yield "azureml compute", True, f"{what}, and {config.nodes} node(s) fit", ""


class AzureMlBackend:
    """A workspace. State: what is known of the folders, and how jobs that are over ended."""

    poll_seconds = 10.0

    def __init__(self, config: ClusterConfig, files: Callable[[str], Files]) -> None:
        """`files` gives the container of a store by its name, the home's own by an empty one. Raises ValueError, Missing."""
        try:
            import azure.ai.ml  # noqa: F401
        except ModuleNotFoundError as error:
            raise Missing(
                f"backend azureml needs the package azure-ai-ml ({error.name} is not installed)",
                remedy="pip install -c constraints.txt -e '.[azure]'",
            ) from error
        self._cluster, self._config = config, config.azureml
        self._files = files(config.azureml.store)
        self._workspace = Workspace(config.azureml, self._files.token)
        self._folders = Folders(self._files)

    def render(self, job: Job, folder: Path) -> Rendered:
        return rendering(self._cluster, self._files, job, folder).rendered()

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        self._cluster.require_own()
        with before_submission():
            place = self._folders.place(prefix_of(folder))
            made = rendering(self._cluster, self._files, job, folder, key_of(folder), place)
            self.require_cluster(job.nodes, preemptible=job.preemptible)
            existing = self._workspace.job(made.name)
            if existing is None:
                self._prepare(made, job, folder)
        if existing is None:
            existing = self._workspace.put_job(made.name, made.request())
        elif existing["properties"].get("status") in OVER:
            raise JobFailed(
                f"the workspace has an ended job of the name {made.name}, and Azure ML gives no name twice",
                failure="user",
                folder=str(folder),
                remedy=f"Delete it (az ml job delete --name {made.name}), and run the same command again.",
            )
        return _handle(made.name, made.prefix, existing)

    def _prepare(self, made: Rendering, job: Job, folder: Path) -> None:
        """Put what a job needs there before it starts: the store, its inputs, its environment, our code, its folder."""
        self._workspace.put_datastore(made.datastore)
        for ref in job.artifacts.values():
            self._files.have(ref)
        for asset in made.assets(by_id=True).values():
            self._workspace.put_asset("data", str(asset.name), str(asset.version), rest(asset))
        if image := made.image():
            self._workspace.put_asset("environments", str(image.name), str(image.version), rest(image))
        else:
            self._files.put_once(code_name(), write_code)
        for name, text in (ray.files if (ray := made.ray()) else {}).items():
            write_text(folder / name, text)
        self._folders.push(job.model_copy(update={"python": job.python or "python3"}), folder)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        made = rendering(self._cluster, self._files, job, folder)
        existing = self._workspace.job(job_name(job))
        return _handle(made.name, made.prefix, existing) if existing else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        try:
            names = {folder: job_name(_job_of(folder)) for _, folder in jobs if (folder / "job.json").exists()}
            result = self._workspace.jobs(set(names.values()), tag=OURS)
            return [
                self._state(names[folder], folder, result[names[folder]])
                if folder in names
                else JobState(
                    state="unknown", reason=f"{folder} was deleted: cancel the job, or run the same command again"
                )
                for _, folder in jobs
            ]
        except (HeadwayError, ValueError) as error:
            text = f"{error} {getattr(error, 'remedy', '')}".strip()
            return [JobState(state="unknown", reason=text) for _ in jobs]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        self._workspace.cancel(job_name(_job_of(folder)))

    def _state(self, name: str, folder: Path, result: dict[str, Any] | None) -> JobState:
        """The state; before it is told, the folder is brought up to date, and all of it when the job is over."""
        prefix = prefix_of(folder)
        status = result["properties"].get("status") if result else None
        over = result is None or status in OVER
        lies, tagged = f"{self._folders.place(prefix).uri}/{prefix}", _tags(result).get(f"{OURS}.folder", "")
        if tagged not in ("", lies):
            text = f"its folder lies in {tagged}, and stores.yaml says {lies}: name that store as `jobs` until the job is over"
            return JobState(state="unknown", reason=text)
        # The key by which a job's files are known; none for a job of an earlier release, whose files carry no codes.
        # The workspace tells it, which nobody reaches through the store, so a job that another home submitted is
        # taken too.
        sent = result["properties"] if result else {}
        if result and CODED not in _tags(result):
            key = b""
        else:
            key = str((sent.get("environmentVariables") or {}).get(FOLDER_KEY, "")).encode() or key_of(folder)
        try:
            self._folders.pull(prefix, folder, ended=over, key=key)
            if key and status == "Completed" and (missing := missing_output(folder, _job_of(folder).nodes)):
                some = ", ".join(missing[:3]) + " ..." * (len(missing) > 3)
                raise IntegrityError(
                    f"of what the job sent, {self._folders.place(prefix).uri}/{prefix} has no {some}",
                    remedy="See who may write to this container, and run the same command again.",
                )
        except IntegrityError as error:
            if not over:  # of this job alone: the others' states are known
                return JobState(state="unknown", reason=f"{error} {error.remedy}".strip())
            return JobState(state="ended", code=error.exit_code, reason=str(error), failure="integrity")
        why, log_line = self._why(name, log=ended_state(folder) is None) if status == "Failed" else ({}, "")
        state = state_of(result, why, folder, log_line)
        if state.code == 0 and (folder / "result.json").exists():
            self._folders.drop_checkpoints(prefix, folder)
        return state

    def _why(self, name: str, *, log: bool) -> tuple[dict[str, Any], str]:
        """The error of a job that failed, and the last line of its log; without an answer, none: that it failed is known."""
        try:
            details = self._workspace.details(name)
            line = self._workspace.log_line(details.get("logFiles") or {}) if log else ""
            return dict((details.get("error") or {}).get("error") or {}), line
        except (HeadwayError, ValueError) as error:
            logger.warning("why %s failed is not known: %s", name, error)
            return {}, ""

    @property
    def store(self) -> str:
        """Where the folders of new jobs lie."""
        return self._files.jobs.uri

    def require_cluster(self, nodes: int, *, preemptible: bool) -> str:
        """The VM size of the cluster that jobs run on. What it lacks for such a job is said before anything is sent.

        Raises ValueError when there is none, or not of that tier, or not so large; Missing when it gets no nodes.
        """
        name = self._config.compute
        if name == SERVERLESS:
            return self._config.size
        existing = self._workspace.cluster(name)
        if existing is None:
            raise ValueError(
                f"azureml.compute {name} is not in the workspace {self._config.workspace}: create it (set azureml.size, and "
                "`headway job render` has a file for `az ml compute create --file`), or name another"
            )
        return require_fit(name, existing["properties"], nodes, preemptible=preemptible)


def require_fit(name: str, compute: dict[str, Any], nodes: int, *, preemptible: bool) -> str:
    """The VM size of a cluster that a job fits. Raises ValueError or Missing: too many nodes, another tier, no quota."""
    cluster = compute.get("properties") or {}
    most = int((cluster.get("scaleSettings") or {}).get("maxNodeCount", nodes))
    if nodes > most:
        raise ValueError(f"the job needs {nodes} nodes, and the cluster {name} has at most {most}: lower cluster.nodes")
    low = str(cluster.get("vmPriority") or "Dedicated") == "LowPriority"
    if low != preemptible:
        raise ValueError(
            f"the cluster {name} is of the tier {'low priority' if low else 'dedicated'}, and cluster.preemptible is "
            f"{str(preemptible).lower()}: change it, or name another cluster"
        )
    size = str(cluster.get("vmSize", "unknown size"))
    errors = [*(compute.get("provisioningErrors") or []), *(cluster.get("errors") or [])]
    if errors:
        output = errors[0].get("error") or errors[0]
        raise Missing(
            f"the cluster {name} ({size}) cannot get nodes: {output.get('code', '')} {output.get('message', '')}".strip(),
            remedy="Ask for quota of that size in the studio, or name a cluster of another size or tier.",
        )
    return size


def _job_of(folder: Path) -> Job:
    """The folder's submission, as this home wrote it: the handle lies in the store, which others may write to."""
    return Job.model_validate(read_json(folder / "job.json"))


def _tags(result: dict[str, Any] | None) -> dict[str, str]:
    return (result or {"properties": {}})["properties"].get("tags") or {}


def _handle(name: str, prefix: str, existing: dict[str, Any]) -> dict[str, Any]:
    services = existing["properties"].get("services") or {}
    studio = (services.get("Studio") or {}).get("endpoint", "")
    return {"name": name, "prefix": prefix, "studio": studio}
