"""The section on the data: what validation found in a corpus, and what preprocessing made of it.

Values come from `validation.json` and `tokens.json` (tasks/report/published.py); files of old versions have fewer, and give less
of it. What the checks mean: docs/data.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.report.data import RunReport, number, short
from tasks.report.markup import Html, checks_grid, facts, figure, folded, grid, join, tag, tally
from tasks.report.published import ShardReport, TokensReport, ValidationReport

SHARDS_SHOWN = 20


def corpus_section(data: RunReport) -> Html:
    """Checks, facts, charts, shards, tokens; nothing where no corpus was looked at."""
    parts = []
    if corpus := data.validation:
        limits = data.config.get("validation")
        parts = [
            facts(_facts(corpus)),
            _refs(corpus),
            _part(f"Checks: {tally(corpus.checks)}", _checks(corpus)),
            tag("div", *_figures(corpus, limits if isinstance(limits, dict) else {}), class_="figures"),
            _shards(corpus.shards),
        ]
    return join(*parts, _tokens(data.tokens) if data.tokens else Html())


def _facts(corpus: ValidationReport) -> dict[str, float | str | None]:
    aside = corpus.quarantine.get("documents")
    return {
        "documents": corpus.documents,
        "characters": corpus.characters,
        "bytes of text": corpus.bytes,
        "tokens, estimated": corpus.tokens,
        "unreadable lines": corpus.unreadable,
        "exact duplicates": corpus.duplicates,
        "near duplicates": corpus.near,
        "contaminated": corpus.contaminated,
        "quarantined": aside,
        "shards": len(corpus.shards) or None,
        "MB a second": corpus.megabytes_per_second,
    }


def _refs(corpus: ValidationReport) -> Html:
    refs = {
        "accepted": corpus.accepted,
        "set aside": corpus.quarantined,
        "compared with": corpus.reference,
    }
    listed = [join(tag("dt", name), tag("dd", tag("code", short(ref)))) for name, ref in refs.items() if ref]
    return tag("dl", *listed)


def _checks(corpus: ValidationReport) -> Html:
    """What failed or warned; what passed is folded away."""
    entries = [check for check in corpus.checks if check.outcome != "passed"]
    passed = [check for check in corpus.checks if check.outcome == "passed"]
    return join(checks_grid(entries), folded(f"Passed without a warning: {len(passed)}", checks_grid(passed)))


def _part(heading: str, body: Html) -> Html:
    return join(tag("h3", heading), body) if body else Html()


def _figures(corpus: ValidationReport, limits: Mapping[str, Any]) -> Iterator[Html]:
    from tasks.report.corpus.charts import classes_chart, counts_chart, drift_chart, lengths_chart

    lengths = lengths_chart(corpus.lengths) if corpus.lengths else ""
    yield figure(lengths, "Document lengths", "characters a document")
    before = corpus.before.classes if corpus.before else {}
    text = "share of all characters; the line is the version before" if before else "share of all characters"
    yield figure(classes_chart(corpus.classes, before), "Character classes", text)
    drift = drift_chart(corpus.drift, limits.get("warn_drift"), limits.get("max_drift"))
    yield figure(drift, "Drift", "distance to the version before, Jensen-Shannon")
    rules = {rule: count for rule, count in corpus.quarantine.items() if rule != "documents"}
    yield figure(counts_chart("rules", rules, "Quarantined documents by rule"), "Quarantined, by rule", "documents")
    secrets = counts_chart("secrets", corpus.secret_types, "Secrets by type")
    yield figure(secrets, "Secrets", "findings by type")
    personal = counts_chart("personal", corpus.personal_types, "Personal data by type")
    yield figure(personal, "Personal data", "findings by type")


def _shards(shards: tuple[ShardReport, ...]) -> Html:
    heads = ("Shard", "Documents", "MB", "Unreadable", "Duplicates", "Near", "Secrets", "Personal", "Divergence", "Why")
    order = sorted(shards, key=lambda shard: shard.badness, reverse=True)
    rows = [_shard(shard) for shard in order[:SHARDS_SHOWN]]
    few = len(shards) <= SHARDS_SHOWN
    heading = "Shards, the worst first" if few else f"The {SHARDS_SHOWN} worst of {number(len(shards))} shards"
    return _part(heading, grid(heads, rows, class_="numbers"))


def _shard(shard: ShardReport) -> tuple[str, ...]:
    counts = (shard.unreadable, shard.duplicates, shard.near, shard.secrets, shard.personal)
    return (
        tag("code", shard.name),
        number(shard.documents),
        f"{shard.bytes / 1e6:,.1f}",
        *(number(count) for count in counts),
        "" if shard.divergence is None else f"{shard.divergence:.3f}",
        shard.refused or (f"in {shard.farthest}" if shard.farthest and shard.divergence else ""),
    )


def _tokens(tokens: TokensReport) -> Html:
    rows = [
        (name, number(split.documents), number(split.tokens), f"{split.tokens / max(split.documents, 1):,.0f}")
        for name, split in tokens.splits.items()
    ]
    engine = f", encoded by {tokens.engine}" if tokens.engine else ""
    heading = f"Tokens: a vocabulary of {number(tokens.vocab_size)}{engine}"
    return _part(heading, grid(("Split", "Documents", "Tokens", "Tokens a document"), rows, class_="numbers"))
