"""The values handed from stage to stage, and the gates.

Bytes do not live here: an artifact is a name, a version and a place (tasks/storage holds the bytes).
See docs/DESIGN.md, "Words".
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from tasks.common.errors import GateFailed
from tasks.config.base import NodeName
from tasks.config.cluster import ClusterConfig
from tasks.config.qualification import Verdict

KINDS = (
    "dataset",
    "quarantine",
    "index",
    "tokenizer",
    "tokens",
    "validation",
    "qualification",
    "plan",
    "checkpoint",
    "evaluation",
    "model",
    "drift",
    "revalidation",
    "audit",
)
_REF = re.compile(r"^(?P<kind>[a-z]+)/(?P<name>[a-z0-9][a-z0-9._-]{0,62})(?:@(?P<version>[0-9a-f]{8,64}))?$")


class Value(BaseModel):
    """Base of what stages hand on: small, frozen, plain fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Artifact(Value):
    """An immutable, versioned folder of files in a store."""

    KIND: ClassVar[str] = ""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """64 hex digits: sha256 of the content part of the manifest. Fewer would mean another artifact as soon as somebody publishes
    one that begins with them."""
    uri: str
    metrics: dict[str, float] = {}

    @property
    def ref(self) -> str:
        return f"{self.KIND}/{self.name}@{self.version}"


class Dataset(Artifact):
    KIND = "dataset"


class Quarantine(Artifact):
    """Documents that broke a rule, with the reason; nothing trains on it."""

    KIND = "quarantine"


class Index(Artifact):
    """Hashes and signatures of a corpus's documents, with which later corpora are compared; without their text."""

    KIND = "index"


class Tokenizer(Artifact):
    KIND = "tokenizer"


class Tokens(Artifact):
    KIND = "tokens"


class Checkpoint(Artifact):
    KIND = "checkpoint"


class Evaluation(Artifact):
    KIND = "evaluation"

    subject: Checkpoint


class Model(Artifact):
    KIND = "model"


class Drift(Artifact):
    """New data against reference data: `drift.json` (tasks/data/drift), with a verdict, and no gate."""

    KIND = "drift"

    verdict: str
    """drift, none or insufficient."""


class Audit(Artifact):
    """An audit of an Azure estate: `audit.json` and `audit.html` (tasks/report/estate)."""

    KIND = "audit"


class Check(Value):
    """One measured value against its limit."""

    name: str
    measured: float | str | None
    limit: str
    passed: bool
    remedy: str = ""
    warned: bool = False
    """Whether it passed although what it looks for was found: people are notified, the gate is not closed."""
    insufficient: bool = False
    """Whether there was too little to judge it by: it has not failed, and has not passed either."""
    count: int | None = None
    """How many documents or shards break it, where it counts."""
    samples: tuple[str, ...] = ()
    """A few of those that break it: shard, line and why, without the text of a secret."""

    @property
    def outcome(self) -> str:
        if not self.passed:
            return "insufficient" if self.insufficient else "failed"
        return "warned" if self.warned else "passed"


class Gate(Artifact):
    """An artifact of checks that gives up its subject only when all of them passed."""

    STAGE: ClassVar[str] = ""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def require_passed(self) -> None:
        """Raise GateFailed with every failed check; an empty gate is a closed one."""
        require_checks(self.STAGE, self.checks)


class Validation(Gate):
    """The verdict on a dataset."""

    KIND = "validation"
    STAGE = "validate"

    subject: Dataset

    def require(self) -> Dataset:
        self.require_passed()
        return self.subject


class Cluster(Value):
    """Where jobs run, with the rates that its qualification measured."""

    name: str
    backend: str
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    matmul_gflops_per_rank: float = 0.0
    """Of the slowest rank, in 10^9 floating-point operations a second."""
    allreduce_gigabytes_per_second: float = 0.0
    """Bus bandwidth as nccl-tests define it, in 10^9 bytes a second."""
    peak_tflops: dict[str, float] = {}
    """What one rank can reach at most, by precision, in 10^12 operations a second: of its GPU, without sparsity."""
    memory_bytes_per_node: int = 0
    """Of the machine with the least."""
    sku: str = ""
    """The hardware that it was judged as, as `headway hardware` lists it."""
    qualification: str = ""
    """Reference of the qualification that vouches for it."""
    proven: tuple[NodeName, ...] = ()
    """Machines that proved themselves, healthiest first: jobs run on these only. None: whatever the backend gives."""
    admission: dict[str, Any] | None = Field(None, exclude_if=lambda value: value is None)
    """Of a cluster whose elastic jobs take in machines that are not among `proven`: what measures those, as settings of
    tasks/jobs/benchmark.py. It comes from the run's own settings, never from a record."""
    config: ClusterConfig = ClusterConfig()
    """How it is reached, and how jobs run on it."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def threads_per_node(self) -> int:
        """What one process of a node may use when it has the node alone."""
        return self.ranks_per_node * self.threads_per_rank


def unqualified(config: ClusterConfig) -> Cluster:
    """A cluster as configured, with nothing measured: enough for work that needs no qualification."""
    return Cluster(
        name=config.name,
        backend=config.backend,
        nodes=config.nodes,
        ranks_per_node=config.ranks_per_node,
        threads_per_rank=config.threads_per_rank,
        config=config,
    )


def as_configured(proven: Cluster, config: ClusterConfig) -> Cluster:
    """Machines that proved themselves, reached and run on as this run's settings say.

    A record in the store vouches for machines. Which programs run, with which variables and by which commands, is never taken
    from there: whoever can write to the store could have them run anything.
    """
    if isinstance(proven, Pending):
        return proven
    elastic = config.elastic
    nodes = min(proven.nodes, elastic.max_nodes if elastic else config.nodes)
    if elastic and proven.config.elastic:
        most = min(elastic.max_nodes, proven.config.elastic.max_nodes)
        elastic = elastic.model_copy(update={"max_nodes": most, "min_nodes": min(elastic.min_nodes, most)})
    exclude = tuple(dict.fromkeys((*config.exclude, *proven.config.exclude)))
    now = config.model_copy(update={"nodes": nodes, "exclude": exclude, "elastic": elastic})
    shape = unqualified(config).model_dump(include={"name", "backend", "ranks_per_node", "threads_per_rank"})
    return proven.model_copy(update={**shape, "nodes": nodes, "config": now, "admission": None})


class Qualification(Gate):
    """The verdict on a cluster."""

    KIND = "qualification"
    STAGE = "benchmark"

    subject: Cluster
    hosts: tuple[str, ...] = ()
    baseline: str = ""
    """Digest of the baseline that it was judged by."""
    verdict: Verdict = "unknown"
    """On the machines that are left when those that may be excluded are."""
    sku: str = ""
    """The hardware that it was judged as."""
    expires: str = ""
    """Until when it holds, in UTC (ISO 8601)."""
    machines: dict[str, Verdict] = {}
    """The verdict on each machine, also on those that were left out."""

    def require(self) -> Cluster:
        self.require_passed()
        return self.subject.model_copy(update={"qualification": self.ref})


class Plan(Gate):
    """The verdict on a training run before it starts, and its numbers."""

    KIND = "plan"
    STAGE = "plan"

    steps: int
    checkpoint_every_steps: int
    keep_checkpoints: int
    keep_checkpoints_every: int | None = None
    """Checkpoints of every so many steps are kept for good."""
    seconds_between_failures: float | None = None
    """Mean time, where the plan chose the interval: training corrects it by what saving takes there. None: it was given."""
    seconds: float
    """Estimated training time."""
    correction: float = 1.0
    """What the formulas' time was multiplied by, for what earlier runs took."""
    cost_per_hour: float = 0.0
    """Of all machines, in the prices' currency; 0 where there is no price."""
    max_cost: float | None = None
    """Training ends with a checkpoint when it has cost so much."""
    parameters: int

    def require(self) -> Self:
        self.require_passed()
        return self


class Revalidation(Gate):
    """The verdict on a champion against updated data; its page is tasks/report/revalidation/report.py."""

    KIND = "revalidation"
    STAGE = "verdict"

    subject: Model
    verdict: str
    """valid, degraded, invalid or unknown."""

    def require(self) -> Model:
        self.require_passed()
        return self.subject


class Endpoint(Value):
    """A served model: a ref with a journal, not an artifact."""

    name: str
    url: str
    model: Model

    @property
    def ref(self) -> str:
        return f"endpoint/{self.name}"


class Pending(Value):
    """Stands for the result of a stage that has not run; whatever takes it does not run either."""

    stage: str

    def require(self) -> Self:
        return self


def require_checks(stage: str, checks: tuple[Check, ...]) -> None:
    """Raise GateFailed when a check failed, or when there is none (a gate fails closed)."""
    failed = [check for check in checks if not check.passed]
    if checks and not failed:
        return
    text = "; ".join(f"{c.name}: measured {_measured(c)}, limit {c.limit}" for c in failed) or "nothing was checked"
    raise GateFailed(
        f"the gate of {stage} stays closed: {text}",
        stage=stage,
        checks=[
            {
                "name": c.name,
                "measured": c.measured,
                "limit": c.limit,
                **({"samples": list(c.samples)} if c.samples else {}),
            }
            for c in failed
        ],
        remedy=" ".join(dict.fromkeys(c.remedy for c in failed if c.remedy)),
    )


def _measured(check: Check) -> str:
    """The measured value in the unit of its limit: a share in percent where the limit is in percent."""
    if not isinstance(check.measured, float):
        return str(check.measured)
    return f"{check.measured:.2%}" if "%" in check.limit else f"{check.measured:.6g}"


def parse_ref(text: str, *, kind: str = "") -> tuple[str, str, str]:
    """Split `KIND/NAME[@VERSION]` into its parts; the version may be 8 or more hex digits, or missing (the newest).

    With `kind`, a bare NAME stands for `kind/NAME`.
    """
    match = _REF.fullmatch(text if "/" in text or not kind else f"{kind}/{text}")
    if not kind and _REF.fullmatch(f"dataset/{text}"):
        raise ValueError(f"{text!r} is not a reference: write KIND/NAME, for example dataset/{text} or model/{text}")
    if not match or match["kind"] not in (*KINDS, "endpoint") or (kind and match["kind"] != kind):
        raise ValueError(
            f"{text!r} is not a reference{f' to a {kind}' if kind else ''}: write KIND/NAME or KIND/NAME@VERSION "
            f"(8 or more hex digits), where KIND is {kind or 'one of ' + ', '.join((*KINDS, 'endpoint'))} and NAME is of "
            "lower case letters, digits, dot, dash and underscore"
        )
    return match["kind"], match["name"], match["version"] or ""


def plain(value: Any) -> Any:
    """An artifact or setting as plain JSON values."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
