"""What stages published as JSON, as far as the report shows it: read leniently, keys that are not known here are ignored.

Where the files come from does not live here (page.py), nor what the run itself knows (data.py).

Of `qualification.json` the report says a rate a rank, the all-reduce, and what both must be; the page of the qualification itself
is qualification/report.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.artifacts import Check

Interval = tuple[float, float]


class Published(BaseModel):
    """Base of what a stage published as a JSON file: frozen, and keys that the report does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class LossPoint(Published):
    """One optimizer step; a line of `training_log.jsonl`."""

    step: int
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None


class StepTime(Published):
    """One step, or the mean of neighbouring ones: its parts in seconds, and its speed."""

    step: int
    step_seconds: float
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    tokens_per_second: float = 0.0


class HeldoutPoint(Published):
    """A measurement on held-out text."""

    step: int
    heldout_bits_per_byte: float


class TimeReport(Published):
    """`time` of a training's `result.json`."""

    seconds: Mapping[str, float] = {}
    """By cause: useful, stalled, lost, restarting, starting, idle."""
    flops_convention: str = ""
    peak: Mapping[str, Any] = {}
    memory_gib: float | None = None
    gpu_memory_gib: float | None = None


class TrainingReport(Published):
    """The steps, thinned, and what all attempts together took."""

    steps: tuple[StepTime, ...] = ()
    heldout: tuple[HeldoutPoint, ...] = ()
    time: TimeReport | None = None


class Histogram(Published):
    """Counts between neighbouring edges: one edge more than counts, or as many where the last bin is open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class PublishedCheck(Check):
    """A check of `validation.json`, whatever else stands beside it."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ShardReport(Published):
    """One shard of a corpus: counts of documents, but for `bytes`."""

    name: str
    documents: int
    bytes: int = 0
    unreadable: int = 0
    duplicates: int = 0
    near: int = 0
    secrets: int = 0
    personal: int = 0
    divergence: float | None = None
    """From all other shards together, Jensen-Shannon, base 2."""
    farthest: str | None = None
    """The column in which it lies so far from them."""
    refused: str | None = None
    """Why the admission policy does not let it in."""

    @property
    def badness(self) -> tuple[bool, float]:
        """Larger is worse: refused ones, then those with much that is wrong, or far from all others."""
        wrong = self.unreadable + self.duplicates + self.near + self.secrets + self.personal
        return bool(self.refused), max(wrong / max(self.documents + self.unreadable, 1), self.divergence or 0.0)


class ColumnDrift(Published):
    """How far one column moved since the version that was accepted before."""

    column: str
    distance: float | None = None
    """Jensen-Shannon, base 2: 0 is the same, 1 has nothing in common; None: too little data."""
    moved: tuple[str, ...] = ()


class Before(Published):
    """The `validation.json` that a version was compared with."""

    classes: Mapping[str, float] = {}


class ValidationReport(Published):
    """`validation.json`. Lengths are in characters a document, classes are shares of all characters.

    Only the first keys are in files of old versions.
    """

    documents: int
    characters: int
    bytes: int
    duplicates: int = 0
    lengths: Histogram | None = None
    classes: Mapping[str, float] = {}
    checks: tuple[PublishedCheck, ...] = ()
    unreadable: int | None = None
    tokens: int | None = None
    """Estimated."""
    near: int | None = None
    contaminated: int | None = None
    heldout: int | None = None
    quarantine: Mapping[str, int] = {}
    """Documents set aside by rule, and under `documents` all of them: one may break several rules."""
    shards: tuple[ShardReport, ...] = ()
    drift: tuple[ColumnDrift, ...] = ()
    secret_types: Mapping[str, int] = {}
    personal_types: Mapping[str, int] = {}
    megabytes_per_second: float | None = None
    accepted: str | None = None
    quarantined: str | None = None
    reference: str | None = None
    before: Before | None = None
    """Of the reference, where that is still there."""

    @property
    def read(self) -> str:
        """Which documents training reads, and what was set aside by which rule; empty where nothing was accepted."""
        if not self.accepted:
            return ""
        if not self.quarantined:
            return f"Training reads the dataset as it was published: all of its {self.documents:,} documents."
        rules = {rule: count for rule, count in self.quarantine.items() if rule != "documents"}
        gone = self.quarantine["documents"]
        left = self.documents - (gone - rules.get("unreadable", 0))
        several = ", some by several rules" if sum(rules.values()) > gone else ""
        return (
            f"Training reads a cleaned version of the dataset: {left:,} of its {self.documents:,} documents. Set aside "
            f"before were {gone:,}{several}: {', '.join(f'{count:,} for {rule}' for rule, count in rules.items())}."
        )


class SplitTokens(Published):
    """How much one split holds."""

    documents: int
    sequences: int | None = None
    tokens: int


class TokensReport(Published):
    """`tokens.json`."""

    vocab_size: int
    engine: str | None = None
    splits: Mapping[str, SplitTokens] = {}


class Baseline(Published):
    """What a cluster of this sort must show: 10^9 operations a second and rank, 10^9 bytes a second; None: nothing is asked."""

    name: str
    matmul_gflops_per_rank: float | None = None
    allreduce_gigabytes_per_second: float | None = None


class RankRate(Published):
    """What one rank showed."""

    rank: int
    host: str = ""
    matmul_gflops: float


class AllReduce(Published):
    """Bus bandwidth of an all-reduce, as nccl-tests define it."""

    megabytes: float
    gigabytes_per_second: float | None = None


class QualificationReport(Published):
    """`qualification.json` in short. Its own page has all of it (tasks/report/qualification)."""

    verdict: str = ""
    """Empty: a file of the first form, which had only checks."""
    baseline: Baseline
    ranks: tuple[RankRate, ...] = ()
    allreduce: AllReduce | None = None
    checks: tuple[PublishedCheck, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, payload: Any) -> Any:
        return qualification_in_short(payload) if isinstance(payload, dict) and "measured" in payload else payload


class Share(Published):
    """A share of tokens with its interval, where there were documents enough for one."""

    estimate: float
    interval: Interval | None = None


class Bin(Published):
    """Tokens whose likeliest continuation was given about the same probability."""

    tokens: int
    probability: float
    accuracy: float


class Calibration(Published):
    """The expected calibration error, and the reliability curve."""

    error: float
    bins: tuple[Bin, ...] = ()


class PositionScore(Published):
    """One row of `positions`: tokens that were predicted with `from` to `to` tokens before them."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    tokens: int = 0
    bits_per_token: float | None = None
    interval: Interval | None = None
    joined: bool = False


class MeasuredContext(Published):
    """Tokens that the model takes, and how many of them were measured."""

    declared: int
    measured: int


class SliceScore(Published):
    """One row of `slices` in `evaluation.json`."""

    slice: str
    status: str = "measured"
    documents: int = 0
    bits_per_byte: float | None = None
    interval: Interval | None = None
    perplexity: float | None = None
    accuracy: Share | None = None
    calibration_error: float | None = None


class SuiteReport(Published):
    """One entry of `suites`."""

    metrics: Mapping[str, float] = {}
    samples: int = 0
    failed: str = ""


class Score(Published):
    """A model's bits per byte of held-out text: lower is better."""

    bits_per_byte: float


class Champion(Score):
    """The model that is served now, measured on the same held-out text."""

    ref: str


class Gain(Published):
    """Share by which the model's bits per byte lie under the bigram's."""

    estimate: float
    interval: Interval | None = None


class HeldoutRead(Published):
    """How much of the held-out split was read."""

    documents: int = 0
    available: int = 0
    share: float = 1.0
    """Of the split's tokens."""


class EvaluationReport(Published):
    """`evaluation.json`. The bigram is the interpolated Kneser-Ney one over the same tokens."""

    documents: int
    bytes: int
    tokens: int
    bits_per_byte: float
    interval: Interval | None = None
    perplexity: float | None = None
    unigram: Score | None = None
    bigram: Score | None = None
    gain_over_bigram: Gain | None = None
    confidence: float = 0.95
    accuracy: Share | None = None
    """Top-1, of the tokens."""
    calibration: Calibration | None = None
    slices: tuple[SliceScore, ...] = ()
    suites: Mapping[str, SuiteReport] = {}
    heldout: HeldoutRead | None = None
    context: MeasuredContext | None = None
    positions: tuple[PositionScore, ...] = ()


class Loss(Published):
    """The share by which this model is worse, or what it gained, with its interval."""

    estimate: float
    low: float
    high: float


class ComparedSlice(Published):
    """Both models on the same documents, in bits per byte; `loss` is None where there are too few documents."""

    slice: str
    status: str = "measured"
    documents: int = 0
    candidate: float | None = None
    champion: float | None = None
    loss: Loss | None = None
    candidate_accuracy: float | None = None
    champion_accuracy: float | None = None


class ComparedMetric(Published):
    """A suite's metric of both models; problems won and lost where both tell what became of each."""

    metric: str
    candidate: float
    champion: float | None = None
    samples: int = 0
    won: int = 0
    lost: int = 0
    gain: Loss | None = None
    """The share won less the share lost: over 0 this model is better."""


class ComparisonReport(Published):
    """Champion against challenger."""

    candidate: str
    champion: str
    confidence: float = 0.95
    rows: tuple[ComparedSlice, ...] = ()
    suites: tuple[ComparedMetric, ...] = ()


class Variant(Published):
    """One of `variants.json`; what does not run was not measured."""

    passed: bool
    why: str = ""
    bits_per_byte: float | None = None
    loss: float | None = None
    onnx_bytes: int | None = None


class Variants(Published):
    """`variants.json`: smaller forms of a model, and what they lose."""

    limit: float
    variants: Mapping[str, Variant]


class Parity(Published):
    """`parity.json`: the exported model against the one that was trained."""

    max_logit_error: float
    greedy_equal: int
    greedy_total: int


MATMULS = ("matmul_bf16", "matmul_fp16", "matmul_tf32", "matmul_fp32")
"""The first that was measured is shown."""


def qualification_in_short(payload: dict[str, Any]) -> dict[str, Any]:
    """Fields of QualificationReport."""
    measured, sku, verdict = payload["measured"] or {}, payload.get("sku") or {}, payload.get("verdict") or {}
    rates: dict[str, list[dict[str, Any]]] = {name: [] for name in MATMULS}
    for report in measured.get("ranks") or ():
        for probe in report.get("probes") or ():
            if probe.get("check") in MATMULS and isinstance(probe.get("measured"), int | float):
                of_rank = {"rank": report["rank"], "host": report["node"], "matmul_gflops": probe["measured"] * 1000}
                rates[probe["check"]].append(of_rank)
    shown = next((name for name in MATMULS if rates[name]), MATMULS[-1])
    limit = ((sku.get("limits") or {}).get(shown) or {}).get("fail")
    sweeps = [sweep for sweep in measured.get("sweeps") or () if _of_all(sweep)]
    # Bus bandwidth of the largest message of the newest sweep
    rows = [row for row in (sweeps[-1].get("rows") or () if sweeps else ()) if row.get("busbw") is not None]
    row = max(rows, key=lambda row: row["bytes"], default=None)
    largest = row and {"megabytes": row["bytes"] / 1e6, "gigabytes_per_second": row["busbw"]}
    # What the all-reduce of all machines must reach, at the largest message that has a limit
    limits = [one for one in sku.get("collectives") or () if _of_all(one) and one.get("fail")]
    floor = max(limits, key=lambda one: one["bytes"])["fail"] if limits else None
    return {
        "verdict": verdict.get("verdict") or "unknown",
        "baseline": {
            "name": sku.get("name") or "",
            "matmul_gflops_per_rank": limit * 1000 if isinstance(limit, int | float) else None,
            "allreduce_gigabytes_per_second": floor,
        },
        "ranks": rates[shown],
        "allreduce": largest,
        "checks": payload.get("checks") or (),
    }


def _of_all(sweep: dict[str, Any]) -> bool:
    return (sweep.get("collective"), sweep.get("scope")) == ("all_reduce", "all")
