"""Every setting, as one frozen tree of classes; one class a stage, handed to it and read back by its job.

What does not live here: the base class and where state lies (tasks/config/base.py), the sections of the data stages, of training
and of the cluster (tasks/*_config.py), where files come from and how errors are printed (deployments/cli). See
docs/configuration.md. A field's docstring is its help text, in docs/configuration.md and in Prefect's form.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from tasks.config.base import Name, Positive, Settings
from tasks.config.cluster import ClusterConfig
from tasks.config.data import PreprocessingConfig, ValidationConfig
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.planning import PlanningConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.config.revalidation import RevalidationConfig
from tasks.config.serving import DeploymentConfig, ExportConfig
from tasks.config.training import ExecutionConfig, TrainingConfig

# What of the settings of training an engine does not have: refused before anything starts, each with a remedy.
#
# The settings are tasks/config/training.py; what becomes of them, tasks/jobs/training and
# tasks/formats/megatron_arguments.py.


def require_engine_fits(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError that names the setting and what to do."""
    {"torch": _require_torch, "deepspeed": _require_deepspeed, "megatron": _require_megatron}[training.engine](
        training, execution
    )


def _require_no_megatron(engine: str, execution: ExecutionConfig) -> None:
    only_megatron = {"pipeline_parallel": execution.pipeline_parallel, "context_parallel": execution.context_parallel}
    for name, value in only_megatron.items():
        if value > 1:
            raise ValueError(f"execution.{name} {value} needs the engine megatron, not {engine}")


def _require_whole_replicas(training: TrainingConfig, execution: ExecutionConfig, *, whole: bool) -> None:
    every = training.safety.repeat_every_steps
    if every and not whole:
        raise ValueError(
            f"training.safety.repeat_every_steps {every} compares whole replicas: it needs the engine torch with "
            f"execution.parallel ddp, not {training.engine} with {execution.parallel}"
        )


def _require_torch(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """What cannot share matrices; a base model's family is looked at by the job."""
    _require_no_megatron("torch", execution)
    _require_whole_replicas(training, execution, whole=execution.parallel == "ddp" and execution.tensor_parallel == 1)
    asked = f"execution.tensor_parallel {execution.tensor_parallel}"
    if execution.tensor_parallel == 1:
        return
    if execution.parallel != "fsdp":
        raise ValueError(f"{asked} needs execution.parallel fsdp, which also divides what the matrices' ranks hold")
    if training.lora.rank:
        raise ValueError(f"{asked} has no plan for adapters: set it to 1, or leave training.lora.rank out")
    if training.network.architecture != "llama" and not training.base:
        raise ValueError(f"{asked} has a plan for llama only, not for {training.network.architecture}: set it to 1")


def _require_deepspeed(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """What ZeRO does not do here: it divides weights in its own way."""
    _require_no_megatron("deepspeed", execution)
    _require_whole_replicas(training, execution, whole=False)
    asked = {
        "execution.tensor_parallel": (execution.tensor_parallel, execution.tensor_parallel > 1),
        "execution.parallel": (execution.parallel, execution.parallel != "ddp"),
        "execution.compile": (execution.compile, execution.compile),
        "execution.local_every_steps": (execution.local_every_steps, execution.local_every_steps is not None),
        "training.lora.rank": (training.lora.rank, training.lora.rank is not None),
    }
    for name, (value, refused) in asked.items():
        if refused:
            raise ValueError(f"the engine deepspeed has no {name} {value}: use the engine torch, or leave it out")
    zero = execution.deepspeed
    if zero.zero_stage == 1 and training.precision == "bf16" and zero.offload == "none":
        raise ValueError(
            "execution.deepspeed.zero_stage 1 with training.precision bf16 is an optimizer of DeepSpeed's that has no "
            "norm to judge steps by: set zero_stage to 2"
        )


def _require_megatron(training: TrainingConfig, execution: ExecutionConfig) -> None:
    if not execution.megatron.checkout:
        raise ValueError(
            "the engine megatron needs execution.megatron.checkout: the folder of Megatron-LM on the machines"
        )
    _require_its_own_loop(training, execution)
    shape = training.network
    parts = (
        ("pipeline_parallel", execution.pipeline_parallel, "layers", shape.layers),
        ("tensor_parallel", execution.tensor_parallel, "heads", shape.heads),
        ("tensor_parallel", execution.tensor_parallel, "kv_heads", shape.kv_heads),
    )
    for name, ranks, what, count in parts:
        if count % ranks:
            raise ValueError(f"network.{what} {count} does not divide into execution.{name} {ranks} parts")
    context = execution.context_parallel
    if context > 1 and training.sequence_length % (2 * context):
        raise ValueError(
            f"sequence_length {training.sequence_length} is no multiple of 2 x execution.context_parallel = {2 * context}"
        )
    if execution.megatron.sequence_parallel and execution.tensor_parallel == 1:
        raise ValueError("execution.megatron.sequence_parallel needs execution.tensor_parallel of 2 or more")
    _require_converter(training, execution)
    if execution.megatron.flavour == "megatron-deepspeed":
        stage = execution.deepspeed.zero_stage
        if execution.pipeline_parallel > 1 and stage > 1:
            raise ValueError(
                f"Megatron-DeepSpeed pipelines have ZeRO 1 only: execution.deepspeed.zero_stage {stage} needs pipeline_parallel 1"
            )
        if training.schedule != "cosine":
            raise ValueError(f"Megatron-DeepSpeed has no schedule {training.schedule}: use cosine")
        if execution.recompute == "selective":
            raise ValueError("Megatron-DeepSpeed recomputes all or nothing: execution.recompute full or none")


def _require_its_own_loop(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Megatron-LM has a loop of its own, so what our loop does between steps is not there."""
    safety = training.safety
    ours: dict[str, Any] = {
        "training.safety.not_finite": safety.not_finite if safety.not_finite != "stop" else None,
        "training.safety.spike_factor": safety.spike_factor,
        "training.safety.repeat_every_steps": safety.repeat_every_steps,
        "training.base": training.base,
        "training.lora.rank": training.lora.rank,
        "training.mask_documents": training.mask_documents,
        "execution.parallel": execution.parallel if execution.parallel != "ddp" else None,
        "execution.compile": execution.compile,
        "execution.cache_gib": execution.cache_gib,
        "execution.heldout_every_steps": execution.heldout_every_steps,
        "execution.profile_from": execution.profile_from,
        "execution.local_every_steps": execution.local_every_steps,
        "execution.notices.ask": execution.notices.ask,
    }
    for name, value in ours.items():
        if value:
            raise ValueError(
                f"the engine megatron has no {name} ({value}): leave it out, or use the engine torch. "
                "What Megatron-LM has for it can be given in execution.megatron.arguments"
            )


def _require_converter(training: TrainingConfig, execution: ExecutionConfig) -> None:
    """Raises ValueError for a network whose checkpoint nobody could read afterwards: before it is trained, not after."""
    megatron = execution.megatron
    read = megatron.flavour == "megatron-lm" and training.network.architecture == "llama"
    if not read and not megatron.converter:
        raise ValueError(
            f"Megatron-Bridge reads no {training.network.architecture} of {megatron.flavour}: name the command that converts its "
            "checkpoints in execution.megatron.converter"
        )


class ApprovalConfig(Settings):
    """Whether a person must agree before the new model takes the endpoint."""

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


StageName = Literal["validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export", "deploy"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Those of a retraining, in their order."""


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
    def _engine_fits(self) -> RetrainConfig:
        require_engine_fits(self.training, self.execution)
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
    def _can_be_served(self) -> RetrainConfig:
        azureml = self.served.azureml
        named = ("subscription_id", "resource_group", "workspace", "image")
        empty = [name for name in named if self.deployment.backend == "azureml" and not getattr(azureml, name)]
        if empty:
            raise ValueError(f"deployment.backend is azureml: set deployment.azureml.{empty[0]} (docs/azureml.md)")
        return self

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
