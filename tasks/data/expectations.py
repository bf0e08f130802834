"""What is expected of a corpus, as values: rules for one document, and figures of the whole with their limits. Pure.

tasks/data/judging.py makes Great Expectations' expectations of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.config.data import Rule, ValidationConfig
from tasks.data.corpus.quarantine import BORDER
from tasks.data.drift.histograms import Drift

SAMPLES = 5
INSUFFICIENT = "insufficient data"


@dataclass(frozen=True)
class DocumentRule:
    """One document keeps it when the value in its column lies within the bounds."""

    name: Rule
    column: str
    share: float
    """Largest share of documents that may break it."""
    setting: str
    """The setting that holds the share."""
    remedy: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Figure:
    """One number of a corpus, its limits, and what is told of it."""

    name: str
    value: float | None
    """None: too little data to tell; that keeps every limit."""
    limit: str
    remedy: str
    low: float | None = None
    high: float | None = None
    count: int | None = None
    samples: tuple[str, ...] = ()
    found: bool = False
    """Whether there is something to tell although the limit is kept."""


def document_rules(config: ValidationConfig, *, benchmarks: bool) -> list[DocumentRule]:
    """The rules that hold for each document; those that are not looked for are left out."""
    encoding = "Is it text, and UTF-8? Publish it decoded."
    bad = config.max_bad_documents, "max_bad_documents"
    least, most = config.min_characters, config.max_characters
    rules = [
        DocumentRule("too short", "characters", config.max_short_share, "max_short_share", "Drop short documents.", least),
        DocumentRule(
            "too long", "characters", config.max_long_share, "max_long_share", "Split long documents.", None, most
        ),
        DocumentRule("control characters", "control", *bad, encoding, None, config.max_control_share),
        DocumentRule("replacement characters", "replacement", *bad, encoding, None, config.max_replacement_share),
        DocumentRule(
            "repeated lines", "repeated", config.max_repetitive_documents, "max_repetitive_documents",
            "Remove documents that say one thing again and again.", None, config.max_repeated_line_share,
        ),
        DocumentRule(
            "exact duplicates", "exact_of", config.max_duplicate_share, "max_duplicate_share",
            "Remove repeated documents.", None, -1,
        ),
    ]  # fmt: skip
    if config.near_duplicates:
        rules.append(
            DocumentRule(
                "near duplicates", "near_of", config.max_near_duplicate_share, "max_near_duplicate_share",
                "Remove documents that repeat others with few changes.", None, -1,
            )
        )  # fmt: skip
    if benchmarks:
        rules.append(
            DocumentRule(
                "contamination", "benchmark", config.max_contaminated_share, "max_contaminated_share",
                "Remove what a model is measured by from what it learns.", None, -1,
            )
        )  # fmt: skip
    return [
        *rules,
        DocumentRule(
            "secrets", "secrets", config.max_secret_share, "max_secret_share",
            "Revoke the secrets and remove them, or name the rule in validation.quarantine.", None, 0,
        ),
        DocumentRule(
            "personal data", "personal", config.max_personal_share, "max_personal_share",
            "Remove or mask it, or name the rule in validation.quarantine.", None, 0,
        ),
    ]  # fmt: skip


def of_rule(rule: DocumentRule, count: int, documents: int, samples: tuple[str, ...]) -> Figure:
    """The share of documents that break a rule."""
    limit = f"<= {rule.share:.2%} of documents"
    remedy = f"{rule.remedy} Or raise validation.{rule.setting}."
    return Figure(
        rule.name, count / max(documents, 1), limit, remedy, None, rule.share, count, samples, found=count > 0
    )


def of_size(config: ValidationConfig, *, documents: int, left: int, tokens: float) -> list[Figure]:
    """How much there is; `left` is what the quarantine leaves."""
    fewest, few = config.min_documents, "Publish more documents."
    empty = () if left else ("the quarantine leaves no document",)
    return [
        Figure("documents", documents if left else 0, f">= {fewest}", few, fewest, samples=empty),
        Figure("estimated tokens", tokens, f">= {config.min_tokens}", few, config.min_tokens),
    ]


def of_unreadable(config: ValidationConfig, count: int, documents: int, samples: tuple[str, ...]) -> Figure:
    """The share of lines that are no documents."""
    most = config.max_unreadable_share
    remedy = (
        "Correct these lines, set validation.text_field to the field that holds the text, or raise "
        "validation.max_unreadable_share."
    )
    share = count / max(count + documents, 1)
    return Figure("unreadable", share, f"<= {most:.2%} of lines", remedy, None, most, count, samples, found=count > 0)


def of_border(result: int, left: int, samples: tuple[str, ...]) -> Figure:
    """Documents that repeat one on the other side of the held-out border, and how many of them the quarantine leaves."""
    remedy = "Name exact and near duplicates in validation.quarantine: a model is measured on what it has not read."
    limit = "<= 0 left in the dataset"
    return Figure(BORDER, left, limit, remedy, None, 0, result, samples, found=result > 0)


def of_classes(config: ValidationConfig, shares: Mapping[str, float]) -> list[Figure]:
    """Classes of characters that have a limit."""
    results = []
    for setting, limits in (("min_class_share", config.min_class_share), ("max_class_share", config.max_class_share)):
        least = setting == "min_class_share"
        for name, limit in limits.items():
            text = f"{'>=' if least else '<='} {limit:.2%} of characters"
            low, high = (limit, None) if least else (None, limit)
            remedy = f"Is this the corpus that you meant? If so, change validation.{setting}."
            results.append(Figure(f"class {name}", shares[name], text, remedy, low, high))
    return results


def of_shards(config: ValidationConfig, apart: Mapping[str, Drift]) -> Figure:
    """The shard that lies farthest from all others."""
    most = config.max_shard_divergence
    order = sorted(apart.items(), key=lambda item: -(item[1].distance or 0.0))
    far = [(name, drift) for name, drift in order if (drift.distance or 0.0) > most]
    samples = tuple(
        f"{name}: {drift.distance:.2f} in {drift.column}: {', '.join(drift.moved)}" for name, drift in far[:SAMPLES]
    )
    remedy = "These shards are of another kind: leave them out, or raise validation.max_shard_divergence."
    value = order[0][1].distance if order else None
    return Figure("shard divergence", value, f"<= {most}", remedy, None, most, len(far), samples)


def of_drift(config: ValidationConfig, drift: Sequence[Drift]) -> list[Figure]:
    """Every column against the version that was accepted before."""
    remedy = "Look at what moved. If it is meant, raise validation.max_drift for this version."
    return [
        Figure(
            f"drift of {each.column}", each.distance, f"<= {config.max_drift}", remedy, None, config.max_drift,
            samples=each.moved if (each.distance or 0.0) >= config.warn_drift else (),
            found=(each.distance or 0.0) >= config.warn_drift,
        )
        for each in drift
    ]  # fmt: skip


def of_admission(refused: Mapping[str, str]) -> Figure:
    """Shards that the admission policy does not let in."""
    samples = tuple(f"{name}: {why}" for name, why in list(refused.items())[:SAMPLES])
    remedy = "Leave these shards out, have them signed, or change validation.admission."
    return Figure("admission", len(refused), "<= 0 shards", remedy, None, 0, len(refused), samples)
