"""A job for Azure ML as values: the command job, the data assets of its inputs, and the cluster it wants, by the SDK's classes.

Nothing here asks Azure. What is sent is the SDK's REST form; the YAML is what `az ml job create --file` takes.
See https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts import parse_ref
from tasks.azure import arm_client
from tasks.azure.datastore import Datastore
from tasks.compute.job import Job, Rendered
from tasks.compute.job_folder import SEEN, Files, code_name, prefix_of
from tasks.compute.nodes import network_environment
from tasks.compute.ray_driver import ray_on_nodes
from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.cluster import ClusterConfig

if TYPE_CHECKING:
    from azure.ai.ml.entities import AmlCompute, CommandJob, Data, Environment

DIGITS = 12
"""Of a version: what Azure ML calls the version of an asset."""
LONGEST_NAME = 255
SERVERLESS = "serverless"
"""Name of no cluster: Azure ML brings machines of `azureml.size` by itself."""
LAST_FILES_SECONDS = 600.0
"""Azure ML's own time limit is longer than ours by this, so that ours ends the job and its last files arrive."""
CHECK = """import hashlib, sys
if sys.version_info < (3, 11):
    sys.exit("Headway needs Python 3.11 or later, this environment has " + sys.version.split()[0] +
             ": name another one in azureml.environment, or an image in cluster.image")
if hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() != sys.argv[2]:
    sys.exit("The code in the store is not the code that was sent there: see who may write to the container, "
             "and delete code/headway-" + sys.argv[2] + ".zip")
"""
"""What an environment's Python executes first: curated ones have 3.10, and the code that it is about to run lies in the store."""
OURS = "headway"
"""Tag of all jobs of Headway, by which they are listed."""
CODED = "headway.codes"
"""Tag of a job whose files carry the code of its folder's key."""
FOLDER_KEY = "HEADWAY_FOLDER_KEY"
"""Variable that hands that key to the nodes; as in tasks/jobs/node/mirror.py."""


@dataclass(frozen=True)
class Rendering:
    """What a job is made of in a workspace."""

    cluster: ClusterConfig
    files: Files
    job: Job
    prefix: str
    key: bytes = b""
    """Of the job's folder: its files carry codes by it. Empty for who only reads the request."""
    place: Files | None = None
    """The container that the folder lies in; without one, that of new jobs: who only reads the request asks nobody."""

    @property
    def config(self) -> AzureMlConfig:
        return self.cluster.azureml

    @property
    def name(self) -> str:
        return job_name(self.job)

    @property
    def workspace(self) -> str:
        """The workspace's id in Azure Resource Manager."""
        return arm_client.workspace_id(self.config)

    @property
    def datastore(self) -> Datastore:
        """By which the workspace knows the store."""
        return Datastore(self.config, self.files.uri)

    def rendered(self) -> Rendered:
        """The request, and the same as files for the Azure CLI."""
        texts = {"job.yml": _yaml(self.command_job(by_id=False))}
        texts |= {f"data-{key}.yml": _yaml(asset) for key, asset in self.assets(by_id=False).items()}
        texts["datastore.yml"] = _yaml(self.datastore.entity())
        if self.config.size and self.config.compute != SERVERLESS:
            texts["compute.yml"] = _yaml(self.compute_cluster())
        texts |= ray.files if (ray := self.ray()) else {}
        return Rendered(backend="azureml", files=texts, request=self.request())

    def request(self) -> dict[str, Any]:
        """Body of PUT .../jobs/NAME."""
        return rest(self.command_job(by_id=True))

    def command_job(self, *, by_id: bool) -> CommandJob:
        """The job; the service takes other resources by their ids, the Azure CLI by their names."""
        from azure.ai.ml.entities import CommandJob, CommandJobLimits

        config, job = self.config, self.job
        limit = job.time_limit
        if self.config.compute == SERVERLESS:
            compute = None
        else:
            compute = f"{self.workspace}/computes/{self.config.compute}" if by_id else self.config.compute
        return CommandJob(
            name=self.name,
            display_name=job.id,
            description=f"{job.name}, submission {job.submission}, by Headway",
            experiment_name=config.experiment,
            command=self.command(),
            environment=self._environment(by_id=by_id),
            environment_variables={
                **network_environment(job),
                "PYTHONUNBUFFERED": "1",
                "PYTHONSAFEPATH": "1",
                **({FOLDER_KEY: self.key.decode()} if self.key else {}),
            },
            compute=compute,
            inputs=self._inputs(by_id=by_id),
            limits=CommandJobLimits(timeout=int(limit + LAST_FILES_SECONDS)) if limit else None,
            tags={**config.tags, **self.tags()},
            **self._machines(),
        )

    def _machines(self) -> dict[str, Any]:
        """How many machines of which tier, what starts our agent on each, and who it is there."""
        from azure.ai.ml import MpiDistribution, PyTorchDistribution
        from azure.ai.ml.entities import (
            JobResourceConfiguration,
            ManagedIdentityConfiguration,
            QueueSettings,
            UserIdentityConfiguration,
        )

        mpi, user = self.job.launcher == "mpi", self.config.identity == "user"
        serverless = self.config.compute == SERVERLESS
        tier = QueueSettings(job_tier="spot" if self.job.preemptible else "standard") if serverless else None
        return {
            "distribution": (MpiDistribution if mpi else PyTorchDistribution)(process_count_per_instance=1),
            "resources": JobResourceConfiguration(
                instance_count=self.job.nodes,
                shm_size=self.config.shm_size,
                instance_type=self.config.size if serverless else None,
            ),
            "identity": UserIdentityConfiguration() if user else ManagedIdentityConfiguration(),
            "queue_settings": tier,
        }

    def tags(self) -> dict[str, str]:
        job = self.job
        output = {"stage": job.name, "token": job.token, "submission": str(job.submission), "spec": job.spec_digest}
        output["folder"] = f"{self._jobs.uri}/{self.prefix}"
        coded = {CODED: "sha256"} if self.key else {}
        return {OURS: "job", **coded, **{f"{OURS}.{key}": value for key, value in output.items()}}

    def command(self) -> str:
        """What each machine executes: the mirror of the job folder, and below it the node agent."""
        python = shlex.quote(self.job.python or "python3")
        codes = " --codes" if self.key else ""  # an image of an earlier release, which makes none, refuses it at once
        mirror = self.cluster.mirror
        lag = f" --max-lag-seconds {mirror.max_lag_minutes * 60:g}" if mirror else ""
        kind = "azureml_user" if self.config.identity == "user" else "managed_identity"
        jobs = f" --jobs {shlex.quote(self._jobs.uri)}" if self._jobs.uri != self.files.uri else ""
        secret = f" --secret {self.files.secret}" if self.files.credential == "connection_string" else ""
        credential = f"{'connection_string' if secret else kind}{secret}"
        store = f"--store {shlex.quote(self.files.uri)}{jobs} --credential {credential}"
        place = f"{store} --prefix {shlex.quote(self.prefix)}{codes}{lag}"
        ray = self.ray()
        agent = shlex.join(ray.command) if ray else f"{python} -m tasks.common.process {{node}}"
        command = f"{python} -m tasks.jobs.node.mirror {place} -- {agent}"
        if self.job.image:
            return f"exec {command}"
        unpack = f'code="$(mktemp -d)" && {python} -m zipfile -e "${{{{inputs.headway}}}}" "$code"'
        digest = code_name().removeprefix("code/headway-").removesuffix(".zip")
        check = f'{python} -c {shlex.quote(CHECK)} "${{{{inputs.headway}}}}" {digest}'
        return f'{check} && {unpack} && PYTHONPATH="$code" exec {command}'

    def ray(self) -> Rendered | None:
        """What starts a Ray head and workers on the nodes, where the job runs on Ray."""
        if not self.config.ray:
            return None
        placed = {"image": self.job.image or "curated", "python": self.job.python or "python3"}
        return ray_on_nodes(self.job.model_copy(update=placed), SEEN, self.cluster.ray)

    @property
    def _jobs(self) -> Files:
        return self.place or self.files.jobs

    def assets(self, *, by_id: bool) -> dict[str, Data]:
        """A data asset for each input: the folder of its version in the store, where its manifest lies."""
        from azure.ai.ml.entities import Data

        return {
            key: Data(
                name=asset_name(ref),
                version=parse_ref(ref)[2][:DIGITS],
                type="uri_folder",
                path=self.datastore.address(self.files.place(ref), by_id=by_id),
                description=f"{ref}, by Headway",
                tags={OURS: "artifact", f"{OURS}.ref": ref},
            )
            for key, ref in self.job.artifacts.items()
        }

    def image(self) -> Environment | None:
        """The environment of an image of one's own; None for one that is there."""
        from azure.ai.ml.entities import Environment

        if not self.job.image:
            return None
        digest = hashlib.sha256(self.job.image.encode()).hexdigest()[:DIGITS]
        return Environment(name="headway-image", version=digest, image=self.job.image)

    def compute_cluster(self) -> AmlCompute:
        """A compute cluster that this job fits on, and that costs nothing while nobody needs it."""
        from azure.ai.ml.entities import (
            AmlCompute,
            IdentityConfiguration,
            ManagedIdentityConfiguration,
            NetworkSettings,
        )

        config = self.config
        identity = ManagedIdentityConfiguration(resource_id=config.cluster_identity)
        return AmlCompute(
            name=self.config.compute,
            size=self.config.size,
            min_instances=0,
            max_instances=max(config.max_nodes, self.job.nodes),
            idle_time_before_scale_down=int(self.config.idle_minutes * 60),
            tier="low_priority" if self.job.preemptible else "dedicated",
            network_settings=NetworkSettings(vnet_name=config.vnet or None, subnet=config.subnet)
            if config.subnet
            else None,
            enable_node_public_ip=config.public_address,
            identity=IdentityConfiguration(type="user_assigned", user_assigned_identities=[identity])
            if config.cluster_identity
            else None,
        )

    def _environment(self, *, by_id: bool) -> Environment | str:
        from azure.ai.ml.entities import Environment

        named = self.config.environment
        if self.job.image and not by_id:
            return Environment(image=self.job.image)
        if made := self.image():
            name, version = made.name, made.version
        elif by_id and named.startswith("azureml:") and not named.startswith("azureml://"):
            _, name, version = named.split(":")
        else:
            return named
        return f"{self.workspace}/environments/{name}/versions/{version}"

    def _inputs(self, *, by_id: bool) -> dict[str, Any]:
        """Handed on as addresses: the job itself fetches what they hold, and verifies it by its manifest."""
        from azure.ai.ml import Input

        result: dict[str, Any] = {}
        for key, asset in self.assets(by_id=by_id).items():
            named = f"azureml:{asset.name}:{asset.version}"
            reference = f"{self.workspace}/data/{asset.name}/versions/{asset.version}"
            result[key] = Input(type="uri_folder", path=reference if by_id else named, mode="direct")
        if not self.job.image:
            code = self.datastore.address(code_name(), by_id=by_id)
            result[OURS] = Input(type="uri_file", path=code, mode="download")
        return result


def rendering(
    cluster: ClusterConfig, files: Files, job: Job, folder: Path, key: bytes = b"", place: Files | None = None
) -> Rendering:
    """What a job is on Azure ML. Raises ValueError for what Azure ML cannot do."""
    config = cluster.azureml
    if job.elastic:
        raise ValueError(
            "Azure ML gives a job all its nodes at once and ends it when one is lost: leave cluster.elastic empty. "
            "A job that lost a node is submitted again, and continues from its checkpoint"
        )
    if job.excluded_nodes and not job.submission > 1:
        raise ValueError(
            f"Azure ML lets nobody choose nodes: leave cluster.exclude empty ({', '.join(job.excluded_nodes)})"
        )
    if config.compute == SERVERLESS and not config.size:
        raise ValueError("azureml.compute is serverless: name the VM size in azureml.size")
    if set(job.artifacts) & {OURS}:
        raise ValueError(f"an input must not be called {OURS}")
    if _emulated(files) != _emulated(files.jobs):
        raise ValueError(
            f"nodes have one credential, and {files.uri} and {files.jobs.uri} (`jobs` of stores.yaml) have not the same "
            "connection string: give both the same one, or none"
        )
    return Rendering(cluster, files, job, prefix_of(folder), key, place)


def _emulated(files: Files) -> str:
    return files.secret if files.credential == "connection_string" else ""


def job_name(job: Job) -> str:
    """The name under which a submission is put: the same one for the same submission, so that it is never there twice."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", job.submission_id)
    digest = hashlib.sha256(job.submission_id.encode()).hexdigest()[:DIGITS]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - DIGITS - 1]}-{digest}"


def asset_name(ref: str) -> str:
    """An artifact's name as a data asset."""
    kind, name, _ = parse_ref(ref)
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{OURS}-{kind}-{name}")


def rest(entity: Any) -> dict[str, Any]:
    """An entity as the SDK sends it."""
    return arm_client.rest(entity._to_rest_object())


def _yaml(entity: Any) -> str:
    text = io.StringIO()
    entity.dump(text)
    return text.getvalue()
