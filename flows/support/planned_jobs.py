"""The job of each stage of a retraining, as a value: what would be submitted, without a server and without submitting it.

Found by a dry run of the chain (flows/retrain.py): inputs that are recorded are the real ones, what is not made yet is a
placeholder and is named. What a job is made of is tasks/orchestration/job_spec.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from flows.retrain import chain
from flows.support.inputs import others, resolve, tokenizer_of_base, with_template
from tasks import benchmark, evaluate, export, preprocess, train, validate
from tasks import plan as plan_stage
from tasks.artifacts import Artifact, Checkpoint, Cluster, Dataset, Index, Tokenizer, Tokens, parse_ref, unqualified
from tasks.common.errors import Unknown
from tasks.common.home import home
from tasks.compute.job import Job
from tasks.config.base import has_policy
from tasks.config.flows import STAGES, RetrainConfig
from tasks.orchestration.job_spec import Program, job_of
from tasks.orchestration.node_exclusion import machines
from tasks.orchestration.observers import Outcome
from tasks.orchestration.run import lifecycle
from tasks.registry import records
from tasks.storage.store import Store, find

A = TypeVar("A", bound=Artifact)
NOT_YET = "0" * 64
"""Stands for a version or a key that is not known yet."""


@dataclass(frozen=True)
class Planned:
    """A job that was not submitted."""

    job: Job
    pending: tuple[str, ...]
    """What in it is a placeholder, in words."""


@dataclass
class _Found:
    """What a dry run knows. State: what is pending."""

    store: Store
    dataset: str
    """As it was named, or the version that it means."""
    outcomes: dict[str, Outcome]
    pending: list[str] = field(default_factory=list)

    def artifact(self, kind: type[A], name: str, *, made_by: str) -> A:
        """What a stage recorded, or a placeholder."""
        made = [ref for ref in self.outcomes[made_by].outputs if ref.startswith(f"{kind.KIND}/")]
        return self.named(kind, made[-1]) if made else self.missing(kind, name, f"{made_by} makes it")

    def named(self, kind: type[A], ref: str) -> A:
        """What a reference means, or a placeholder when it is not published."""
        _, name, _ = parse_ref(ref, kind=kind.KIND)
        try:
            manifest = find(self.store, *parse_ref(ref, kind=kind.KIND))
        except Unknown:
            return self.missing(kind, name, "it is not published")
        return kind(name=name, version=manifest.version, uri=self.store.uri_of(manifest))

    def missing(self, kind: type[A], name: str, why: str) -> A:
        self.pending.append(f"{kind.KIND}/{name}: {why}")
        return kind(name=name, version=NOT_YET, uri="")

    def accepted(self) -> Dataset:
        """The dataset, without what validation set aside once that is known."""
        left = [ref for ref in self.outcomes["validate"].outputs if ref.startswith("dataset/")]
        return self.named(Dataset, left[-1] if left else self.dataset)


def on_which(stage: str, config: RetrainConfig) -> Cluster:
    """The machines of a stage's job; a qualification takes spares, and no machine twice."""
    if stage == "benchmark":
        return machines(config.cluster, config.benchmark)
    if stage == "evaluate":
        return evaluate.machines(unqualified(config.cluster))
    return unqualified(config.cluster.for_data if stage in ("validate", "preprocess") else config.cluster)


def planned_job(stage: str, dataset: str, config: RetrainConfig) -> Planned:
    """The job of a stage. Raises ValueError for a stage that has none."""
    if stage not in PROGRAMS:
        raise ValueError(f"{stage!r} is no stage that runs a job; those are {', '.join(PROGRAMS)}")
    with lifecycle("retrain", config, subject=config.training.model, stages=STAGES, last=stage, dry=True) as run:
        try:
            resolve(dataset)
        except Unknown:
            benchmark.benchmark(config.cluster, config.benchmark, training=config.training)  # needs no data
        else:
            chain(dataset, config)
    result = _Found(run.store, run.result.dataset or dataset, run.outcomes)
    program: Program = PROGRAMS[stage](result, config)
    key = result.outcomes[stage].key
    if not key:
        result.pending.append("token: the stage's key is known when its inputs are")
    # Where inputs lie; their bytes are not read. Of a local store it is the very folder that the job is given, or that it will be
    # copied to where a policy holds.
    folders = {}
    for name, artifact in program.inputs.items():
        place = f"{artifact.uri.removeprefix('file://')}/files" if artifact.uri.startswith("file://") else artifact.uri
        if not artifact.uri:
            place = f"(not made yet: {artifact.KIND}/{artifact.name})"
        elif artifact.uri.startswith("file://") and has_policy(home()):
            place = str(home() / "cache" / artifact.KIND / artifact.name / artifact.version / "files")
        folders[name] = place
    job = job_of(stage, key or NOT_YET, program, on=on_which(stage, config), folders=folders)
    return Planned(job, tuple(result.pending))


def _of_preprocess(result: _Found, config: RetrainConfig) -> Program:
    ref, base = config.preprocessing.tokenizer.ref, config.training.base
    tokenizer = result.named(Tokenizer, ref) if ref and not base else None  # None: one is trained
    if base:
        try:
            tokenizer = tokenizer_of_base(result.store, config)
        except Unknown:
            _, name, _ = parse_ref(base, kind="checkpoint")
            tokenizer = result.missing(Tokenizer, name, "the base model is not published")
    return preprocess.program(
        result.accepted(), with_template(config.preprocessing), tokenizer, on=on_which("preprocess", config)
    )


def _of_train(result: _Found, config: RetrainConfig) -> Program:
    plan = result.outcomes["plan"]
    record = records.load(result.store, "plan", plan.key) if plan.outputs and plan.key else None
    limits = config.planning.checkpoint
    every = record.value["checkpoint_every_steps"] if record else limits.every_steps
    if every is None:
        result.pending.append("settings.checkpoint_every_steps: plan chooses it")
    base = result.named(Checkpoint, config.training.base) if config.training.base else None
    mixed = _mixed(result, config)
    failures = (
        record.value["seconds_between_failures"]
        if record
        else plan_stage.seconds_between_failures(config.planning, unqualified(config.cluster))
    )
    saving = train.saving(
        every or 0,
        limits.keep,
        keep_every=limits.keep_every,
        seconds_between_failures=failures,
        planned_step_seconds=record.value["seconds"] / record.value["steps"] if record else None,
    )
    return train.program(_tokens(result), config.training, config.execution, base, mixed, limits=saving)


def _of_evaluate(result: _Found, config: RetrainConfig) -> Program:
    checkpoint, tokens = _checkpoint(result, config), _tokens(result)
    length, on = config.training.sequence_length, on_which("evaluate", config)
    if config.training.base:
        result.pending.append("settings.sequence_length: the base model's own context, where it is longer")
    files = tuple(result.named(Dataset, ref) for ref in config.evaluation.files)
    return evaluate.program(
        checkpoint, tokens, config.evaluation, _mixed(result, config), files, sequence_length=length, on=on
    )


def _mixed(result: _Found, config: RetrainConfig) -> tuple[Tokens, ...]:
    return tuple(result.named(Tokens, ref) for ref in others(result.dataset, config.training).values())


def _tokens(result: _Found) -> Tokens:
    return result.artifact(Tokens, parse_ref(result.dataset, kind="dataset")[1], made_by="preprocess")


def _checkpoint(result: _Found, config: RetrainConfig) -> Checkpoint:
    return result.artifact(Checkpoint, config.training.model, made_by="train")


PROGRAMS: dict[str, Any] = {
    "validate": lambda result, config: validate.program(
        result.named(Dataset, result.dataset),
        config.validation,
        config.preprocessing.heldout_fraction,
        tuple(result.named(Dataset, ref) for ref in config.validation.benchmarks),
        tuple(result.named(Index, ref) for ref in config.validation.against),
        on=on_which("validate", config),
    ),
    "preprocess": _of_preprocess,
    "benchmark": lambda result, config: benchmark.program(config.cluster, config.benchmark, config.training),
    "train": _of_train,
    "evaluate": _of_evaluate,
    "export": lambda result, config: export.program(
        _checkpoint(result, config), _tokens(result), config.exported, on=unqualified(config.cluster)
    ),
}
"""The stages that run a job, and what each runs."""
