"""Every setting, as one frozen tree of classes; one class a stage, handed to it and read back by its job.

What does not live here: the base class and where state lies (tasks/config/base.py), the sections of the data stages, of training
and of the cluster (beside this file), where files come from and how errors are printed (deployments/cli). See
docs/configuration.md. A field's docstring is its help text, in docs/configuration.md.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from tasks.config.base import Name, Positive, Settings
from tasks.config.cluster import ClusterConfig
from tasks.config.data import CONVERSATIONS, LicensesConfig, PreprocessingConfig, ValidationConfig
from tasks.config.engines.registry import ENGINES
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig, require_measured
from tasks.config.planning import PlanningConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.config.revalidation import RevalidationConfig
from tasks.config.serving import DeploymentConfig, ExportConfig
from tasks.config.training import ExecutionConfig, TrainingConfig


class ApprovalConfig(Settings):
    """Whether someone must agree before a retraining that an event asked for, before training, and before the deploy."""

    before_train: bool = False
    """Whether the run pauses after the plan until somebody approves what training takes and costs."""
    before_deploy: bool = False
    """Whether the run pauses after the export until somebody approves or rejects."""
    before_retrain: bool = False
    """Whether a run that an event asked for pauses before its first stage, with the evidence beside the form."""
    remind_minutes: float = Field(60.0, gt=0)
    """Time between two reminders while it waits."""
    expire_minutes: float = Field(1440.0, gt=0)
    """Time after which a run that nobody approved ends, its gate closed."""
    valid_hours: float = Field(72.0, gt=0)
    """Time for which an approval counts, for exactly what was asked; after it the same question is asked again."""


def _fewest_machines(config: Any) -> Any:
    least, nodes, named = config.benchmark.act.min_nodes, config.cluster.nodes, config.benchmark.nodes
    if config.cluster.elastic and least:
        raise ValueError(
            f"benchmark.act.min_nodes is {least}: an elastic job's fewest machines are cluster.elastic.min_nodes; leave it empty"
        )
    if least and least > nodes:
        raise ValueError(f"benchmark.act.min_nodes {least} must not be above cluster.nodes {nodes}")
    if len(set(named)) < len(named):
        raise ValueError(f"benchmark.nodes names a machine twice: {', '.join(named)}")
    return config


def _one_text_field(config: Any) -> Any:
    checked, used = config.validation.text_field, config.preprocessing.text_field
    if checked != used:
        raise ValueError(f"validation.text_field {checked!r} and preprocessing.text_field {used!r} must be the same")
    return config


def _learns_what_is_read(config: Any) -> Any:
    field, objective = config.preprocessing.text_field, config.training.objective
    if (field == CONVERSATIONS) != (objective == "sft"):
        raise ValueError(
            f"training.objective {objective} and preprocessing.text_field {field!r} do not fit: sft learns from conversations, "
            f"which are read with validation.text_field and preprocessing.text_field {CONVERSATIONS}; pretrain learns from text"
        )
    return config


StageName = Literal["validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export", "deploy"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Those of a retraining, in their order."""


FORMATS: dict[str, Literal["onnx", "safetensors"]] = {"onnxruntime": "onnx", "vllm": "safetensors"}
"""What each serving runtime loads."""


class RetrainConfig(Settings):
    """One whole retraining run."""

    dataset: str = "python-stdlib"
    """Dataset that is used when none is named: NAME, or dataset/NAME@VERSION."""
    validation: ValidationConfig = ValidationConfig()
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    cluster: ClusterConfig = ClusterConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    planning: PlanningConfig = PlanningConfig()
    training: TrainingConfig = TrainingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    export: ExportConfig = ExportConfig()
    approval: ApprovalConfig = ApprovalConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    revalidation: RevalidationConfig = RevalidationConfig()
    licenses: LicensesConfig = Field(LicensesConfig(), exclude_if=lambda licenses: not licenses.waivers)

    @model_validator(mode="after")
    def _batch_divides(self) -> RetrainConfig:
        """Ranks that share one copy of the network read the same samples."""
        shared = self.execution.ranks_a_copy
        for ranks in self.world_sizes:
            if ranks % shared:
                raise ValueError(
                    f"{ranks} ranks do not divide by execution.tensor_parallel x pipeline_parallel x context_parallel = {shared}"
                )
            at_once = self.training.micro_batch_size * (ranks // shared)
            if self.training.global_batch_size % at_once:
                raise ValueError(
                    f"training.global_batch_size {self.training.global_batch_size} must be a multiple of "
                    f"training.micro_batch_size x ranks = {self.training.micro_batch_size} x {ranks // shared} = {at_once}"
                )
        return self

    @model_validator(mode="after")
    def _conversations_are_brought(self) -> RetrainConfig:
        if self.training.objective == "sft" and self.execution.cache_gib is not None:
            raise ValueError("execution.cache_gib is for pretrain: conversations are brought whole, so leave it empty")
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> RetrainConfig:
        ENGINES[self.training.engine].require_fits(self.training, self.execution)
        return self

    @model_validator(mode="after")
    def _has_positions(self) -> RetrainConfig:
        """Learnt positions end with the sequence; what a base model has is looked at when it is exported."""
        length, trained = self.export.context_length, self.training.sequence_length
        learnt = self.training.network.architecture == "gpt2" and not self.training.base
        if learnt and length and length > trained:
            raise ValueError(
                f"export.context_length {length} is more than a gpt2 network has positions for, training.sequence_length = "
                f"{trained}: raise that, lower this, or leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _rules_are_measured(self) -> RetrainConfig:
        require_measured(self.comparison.rules, self.evaluation)
        if self.comparison.against_base and not self.training.base:
            raise ValueError("comparison.rules has one against the base model, and there is none: set training.base")
        return self

    @model_validator(mode="after")
    def _can_be_served(self) -> RetrainConfig:
        azureml = self.served.azureml
        named = ("subscription_id", "resource_group", "workspace", "image")
        empty = [name for name in named if self.deployment.backend == "azureml" and not getattr(azureml, name)]
        if empty:
            raise ValueError(f"deployment.backend is azureml: set deployment.azureml.{empty[0]} (docs/azureml.md)")
        return self

    @model_validator(mode="after")
    def _is_what_is_served(self) -> RetrainConfig:
        wanted, runtime = FORMATS[self.deployment.runtime], self.deployment.runtime
        if self.export.format not in ("", wanted):
            raise ValueError(
                f"export.format is {self.export.format}, and deployment.runtime {runtime} serves {wanted}: leave the format empty"
            )
        return self

    @property
    def exported(self) -> ExportConfig:
        """The export, in the form that the deployment's runtime serves."""
        wanted = FORMATS[self.deployment.runtime]
        return self.export if wanted == "onnx" else self.export.model_copy(update={"format": wanted, "variants": ()})

    @property
    def served(self) -> DeploymentConfig:
        """The deployment, of Azure ML with the workspace of the cluster where it names none of its own."""
        if self.deployment.backend != "azureml":
            return self.deployment
        of_cluster = ("subscription_id", "resource_group", "workspace", "endpoint", "store")
        own = self.deployment.azureml
        filled = {name: getattr(own, name) or getattr(self.cluster.azureml, name) for name in of_cluster}
        return self.deployment.model_copy(update={"azureml": own.model_copy(update=filled)})

    _one_text = model_validator(mode="after")(_one_text_field)
    _learns = model_validator(mode="after")(_learns_what_is_read)
    _fewest = model_validator(mode="after")(_fewest_machines)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Every number of ranks that training may have, also when machines are left out by the qualification."""
        fewer = range(self.benchmark.act.min_nodes or self.cluster.nodes, self.cluster.nodes)
        return (*(nodes * self.cluster.ranks_per_node for nodes in fewer), *self.cluster.world_sizes)


class RevalidateConfig(Settings):
    """The champion of a model against the newest data. What a retraining run has too is named and meant as there."""

    model: Name = "model"
    """Name of the model; of a retraining run it is `training.model`."""
    validation: ValidationConfig = ValidationConfig()
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    revalidation: RevalidationConfig = RevalidationConfig()

    _one_text = model_validator(mode="after")(_one_text_field)


class ValidateConfig(Settings):
    """A dataset, judged by itself. What a retraining run has too is named and meant as there."""

    validation: ValidationConfig = ValidationConfig()
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    cluster: ClusterConfig = ClusterConfig()


class QualifyConfig(Settings):
    """A cluster, measured by itself. What a retraining run has too is named and meant as there."""

    cluster: ClusterConfig = ClusterConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    training: TrainingConfig = TrainingConfig()

    _fewest = model_validator(mode="after")(_fewest_machines)


class BackupConfig(Settings):
    """A backup of this home. See docs/backup.md."""

    to: Name = "backup"
    """Name of a store of stores.yaml that holds nothing but this home's backups."""
    keep: Positive = 14
    """Backups that stay there; older ones go."""
    drill: bool = False
    """Whether the backup is then restored into a scratch place and compared by hash: proof, for as long as a restore takes."""


class WatchConfig(Settings):
    """A look at what endpoints answered. How that is judged is in `revalidation.service` of the model's configuration."""

    endpoints: tuple[Name, ...] = ()
    """Whose answers; empty: those of every endpoint in service."""
    window_requests: Positive = 200
    """Requests of a row of the series that is shown."""
    windows: Positive = 12
    """Rows that are shown, the newest ones."""


class RehearseConfig(Settings):
    """A rehearsal, in a home of its own. See docs/rehearsal.md."""

    configuration: Name = "tiny"
    """Shipped configuration that is rehearsed; the deployment's."""
    where: str = ""
    """Shipped configuration that says where jobs run, on top of it; empty: where `configuration` says."""
    set: tuple[str, ...] = ()
    """Settings that differ, each as A.B=VALUE, like --set of the command line."""
    dataset: str = ""
    """NAME or dataset/NAME@VERSION; empty: the configuration's."""
    only: tuple[str, ...] = ()
    """Faults that are injected; empty: all."""
    quick: bool = False
    """Whether the faults that take long are left out."""
    seed: int = 1
    """Where and when faults come."""
    hours: float = Field(0.0, ge=0)
    """Then several faults at once, drawn by seed, for so many hours."""


class AuditConfig(Settings):
    """An audit of the Azure estate. See docs/estate.md."""

    exports: str = "estate"
    """Folder with exports, of the home unless it begins with `/`. Of folders in it, the newest one is judged; without any, the
    home's own records alone are."""
    what_if: str = ""
    """File in that folder: what `az deployment sub what-if --no-pretty-print` printed. Empty: `what-if.json`, if it is there."""
    waivers: str = ""
    """File with waivers, of the home unless it begins with `/`; those that the audit log does not have do not count."""
    subscription_id: str = ""
    """Subscription that exports must be of; empty: any one."""
    level: Literal["high", "medium", "low"] = "high"
    """Impact of rows that must be met, and above."""
    strict: bool = False
    """Whether rows that exports or records could show, and do not, count as not met."""
