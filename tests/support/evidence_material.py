"""What a revalidation publishes, made up as it would be: a champion of Python code that meets German text."""

import math
import random
from typing import Any

HASH = "0123456789abcdef" * 4
MODEL, DATASET, REFERENCE = f"model/tickets@{HASH}", f"dataset/tickets@{HASH[::-1]}", f"dataset/tickets@{'ab' * 32}"
CHECKPOINT = f"checkpoint/tickets@{'c4' * 32}"


def check(
    name: str, measured: Any, limit: str, *, passed: bool = True, remedy: str = "", **more: Any
) -> dict[str, Any]:
    return {"name": name, "measured": measured, "limit": limit, "passed": passed, "remedy": remedy, **more}


def column(name: str, title: str, value: float | None, threshold: float | None, **more: Any) -> dict[str, Any]:
    """A column whose null values lie under its threshold."""
    draw = random.Random(name)
    null = [abs(draw.gauss(0.45, 0.16)) * threshold for _ in range(200)] if threshold else []
    found = value is not None and threshold is not None and value > threshold
    return {
        "name": name,
        "title": title,
        "unit": "",
        "value": value,
        "threshold": threshold,
        "p_value": None if value is None else 0.0025 * 10 if found else 0.62,
        "verdict": "insufficient" if value is None else "drift" if found else "none",
        "reference": None,
        "new": None,
        "moved": [],
        "histogram": None,
        "null": null,
        **more,
    }


def histogram(labels: str, reference: list[float], new: list[float]) -> dict[str, Any]:
    return {"labels": labels.split("|"), "reference": reference, "new": new}


def columns() -> list[dict[str, Any]]:
    lengths = "under 256|256 to 512|512 to 1k|1k to 2k|2k to 4k|4k to 8k|8k to 16k|16k to 32k|32k and more"
    kinds = "lower|upper|digit|space|punctuation|latin|other"
    return [
        column(
            "tokens",
            "token frequencies (Jensen-Shannon divergence)",
            0.1834,
            0.0121,
            unit="bits",
            moved=["\u0120der 0.0 % -> 3.1 %", "\u0120self 2.9 % -> 1.4 %", "\u0120und 0.0 % -> 2.2 %"],
        ),
        column(
            "unknown_tokens", "share of unknown tokens", 0.0, 0.0004, unit="standard errors", reference=0.0, new=0.0
        ),
        column("byte_fallback_tokens", "share of byte-fallback tokens", 0.021, 0.0016, reference=0.0004, new=0.0214),
        column("tokens_per_word", "tokens a word", 0.41, 0.062, unit="tokens", reference=2.31, new=2.72),
        column(
            "length",
            "characters a document (Kolmogorov-Smirnov)",
            0.038,
            0.071,
            reference=3120.0,
            new=2987.0,
            histogram=histogram(
                lengths,
                [0.02, 0.06, 0.13, 0.2, 0.25, 0.19, 0.1, 0.04, 0.01],
                [0.03, 0.07, 0.12, 0.21, 0.24, 0.2, 0.09, 0.03, 0.01],
            ),
        ),
        column(
            "language",
            "language mix (Jensen-Shannon divergence)",
            0.23,
            0.014,
            unit="bits",
            moved=["de 0.2 % -> 41.7 %", "en 98.9 % -> 57.6 %"],
            histogram=histogram("en|de|fr|other", [0.989, 0.002, 0.004, 0.005], [0.576, 0.417, 0.003, 0.004]),
        ),
        column(
            "characters",
            "classes of characters (Jensen-Shannon divergence)",
            0.0162,
            0.0049,
            unit="bits",
            moved=["punctuation 11.4 % -> 6.0 %"],
            histogram=histogram(
                kinds, [0.61, 0.04, 0.03, 0.18, 0.114, 0.02, 0.006], [0.66, 0.055, 0.02, 0.17, 0.06, 0.03, 0.005]
            ),
        ),
        column("duplicates", "share of duplicate documents", 0.004, 0.011, reference=0.012, new=0.016),
        column("format", "documents that are not of the reference's formats", None, None),
        column("domain", "domain classifier", 0.871, 0.561, unit="AUC"),
    ]


def classifier() -> dict[str, Any]:
    words = (
        ("und", 3.1, 0.001, 0.39),
        ("der", 2.8, 0.0, 0.41),
        ("nicht", 2.2, 0.0, 0.3),
        ("self", -1.9, 0.71, 0.4),
        ("def", -1.2, 0.8, 0.52),
    )
    features = [{"feature": word, "weight": weight, "reference": old, "new": new} for word, weight, old, new in words]
    return {"auc": 0.871, "threshold": 0.561, "p_value": 0.0025, "features": features}


def drift(**more: Any) -> dict[str, Any]:
    return {
        "schema": "headway/drift/1",
        "reference": REFERENCE,
        "new": DATASET,
        "verdict": "drift",
        "why": "6 of 9 columns are over their thresholds: language 0.23 bits, threshold 0.014; and five more",
        "false_alarm_rate": 0.05,
        "splits": 400,
        "p_value": 0.0025,
        "documents": {"reference": 18210, "new": 4120, "looked_at_reference": 4000, "looked_at_new": 4000},
        "bytes": {"reference": 58000000, "new": 13000000},
        "columns": columns(),
        "classifier": classifier(),
        "seconds": {"total": 8.1},
    } | more


def slice_(name: str, loss: tuple[float, float, float] | None, status: str, documents: int = 240) -> dict[str, Any]:
    told = dict(zip(("estimate", "low", "high"), loss, strict=True)) if loss else None
    new = 1.412 * (1 + loss[0]) if loss else None
    return {
        "slice": name,
        "documents": documents,
        "reference_documents": 310,
        "new": new,
        "promotion": 1.412 if loss else None,
        "loss": told,
        "status": status,
    }


def performance(**more: Any) -> dict[str, Any]:
    return {
        "new": {"bits_per_byte": 1.731, "low": 1.684, "high": 1.779, "perplexity": 31.2, "documents": 412},
        "promotion": {"bits_per_byte": 1.402, "low": 1.371, "high": 1.433, "perplexity": 16.4, "documents": 905},
        "loss": {"estimate": 0.235, "low": 0.188, "high": 0.281},
        "paired": 0,
        "confidence": 0.95,
        "scored_by": CHECKPOINT,
        "slices": [
            slice_("length under 1 kB", (0.31, 0.26, 0.37), "failed"),
            slice_("length 1 to 8 kB", (0.22, 0.17, 0.27), "passed"),
            slice_("length over 8 kB", (0.05, -0.04, 0.14), "passed", 61),
            slice_("language de", None, "insufficient", 171),
            slice_("language en", (0.012, -0.02, 0.045), "passed"),
        ],
    } | more


def service(**more: Any) -> dict[str, Any]:
    return {
        "endpoint": "tickets",
        "model": MODEL,
        "since": 1790000000.0,
        "requests": 1204,
        "reference_requests": 5000,
        "verdict": "anomaly",
        "p_value": 0.004,
        "columns": [
            column(
                "length",
                "tokens an answer",
                0.21,
                0.09,
                verdict="anomaly",
                reference=61.0,
                new=38.0,
                moved=["under 8 4.0 % -> 22.0 %"],
            ),
            column("repetition", "share of repeated 4-grams", 0.02, 0.05, reference=0.11, new=0.12),
            column("entropy", "entropy of the next token, nats", 0.01, 0.06, reference=1.9, new=1.91),
            column("errors", "share of requests that failed by the server's fault", 0.0, 0.02, reference=0.0, new=0.0),
        ],
    } | more


def parts() -> list[dict[str, Any]]:
    return [
        {
            "name": "integrity",
            "status": "passed",
            "said": "12 files in the store and 9 at endpoint/tickets are what was signed.",
            "checks": [check("files in the store", 0, "0 changed"), check("signature", "counts", "one that counts")],
        },
        {
            "name": "data",
            "status": "passed",
            "said": "The dataset passed 14 of 14 checks.",
            "checks": [check("documents", 4120.0, ">= 100"), check("languages", None, "any")],
        },
        {
            "name": "drift",
            "status": "failed",
            "said": "6 of 9 columns moved, language first.",
            "checks": [
                check(
                    "columns that moved",
                    6.0,
                    "0",
                    passed=False,
                    remedy="Look at `drift.json`, or at the columns below.",
                )
            ],
        },
        {
            "name": "performance",
            "status": "failed",
            "said": "Bits per byte rose by 23.5 % (18.8 % to 28.1 %).",
            "checks": [
                check(
                    "loss since promotion, relative",
                    0.188,
                    "<= 0.1",
                    passed=False,
                    remedy="Train on the new data: `headway retrain`.",
                ),
                check("loss of the slice length under 1 kB", 0.26, "<= 0.25", passed=False),
            ],
        },
        {"name": "service", "status": "absent", "said": "No endpoint wrote down what it answered.", "checks": []},
    ]


def told(**more: Any) -> dict[str, Any]:
    """A degraded model, in the second window, with everything measured."""
    return {
        "schema": "headway/revalidation/1",
        "model": MODEL,
        "dataset": DATASET,
        "reference": REFERENCE,
        "verdict": "degraded",
        "why": [
            "performance: bits per byte on the new data are 23.5 % over those at promotion (18.8 % to 28.1 %; at most 10 %).",
            "drift: 6 of 9 columns moved, language first",
        ],
        "parts": parts(),
        "drift": drift(),
        "performance": performance(),
        "service": service(),
        "window": {"number": 2, "of": 2, "data": [REFERENCE, DATASET]},
        "acts": True,
    } | more


def valid() -> dict[str, Any]:
    same = [one | {"verdict": "none", "value": (one["threshold"] or 1) * 0.5} for one in columns()]
    good = [part | {"status": "passed", "said": "As it was.", "checks": []} for part in parts()]
    return told(
        verdict="valid",
        why=["All five parts passed."],
        parts=good,
        acts=False,
        window={"number": 0, "of": 2, "data": []},
        drift=drift(
            verdict="none",
            why="No column moved.",
            columns=same,
            classifier=classifier() | {"auc": 0.508, "features": []},
        ),
        performance=performance(
            loss={"estimate": -0.004, "low": -0.02, "high": 0.011}, slices=performance()["slices"][3:]
        ),
        service=service(verdict="none", columns=service()["columns"][1:]),
    )


def invalid() -> dict[str, Any]:
    changed = check(
        "files in the store",
        1,
        "0 changed",
        passed=False,
        count=1,
        samples=["model.onnx.data: sha256 7f3a, signed as 1b0c"],
        remedy="Make it again: `headway retrain --from export`, with the same -c and --set.",
    )
    broken = {
        "name": "integrity",
        "status": "failed",
        "said": "model.onnx.data is not what was signed.",
        "checks": [changed],
    }
    absent = [
        part | {"status": "absent", "said": "Not looked at: the champion is damaged.", "checks": []}
        for part in parts()[1:]
    ]
    return told(
        verdict="invalid",
        why=["model.onnx.data is not what was signed."],
        parts=[broken, *absent],
        drift=None,
        performance=None,
        service=None,
        acts=False,
        window={"number": 0, "of": 2, "data": []},
    )


def unknown() -> dict[str, Any]:
    lacking = (
        "The new data has 41 documents; at least 100 on either side are needed (`revalidation.drift.min_documents`)."
    )
    few = [
        one | {"verdict": "insufficient", "value": None, "threshold": None, "p_value": None, "null": []}
        for one in columns()
    ]
    looked = [part | {"status": "insufficient", "said": lacking, "checks": []} for part in parts()[2:4]]
    return told(
        verdict="unknown",
        why=[lacking],
        parts=[*parts()[:2], *looked, parts()[4]],
        acts=False,
        service=None,
        drift=drift(
            verdict="insufficient",
            why=lacking,
            p_value=None,
            columns=few,
            classifier=None,
            documents={"reference": 18210, "new": 41, "looked_at_reference": 4000, "looked_at_new": 41},
        ),
        performance=performance(
            new={"bits_per_byte": None, "low": None, "high": None, "perplexity": None, "documents": 3},
            loss=None,
            slices=[slice_("length under 1 kB", None, "insufficient", 3)],
        ),
        window={"number": 0, "of": 2, "data": []},
    )


def hostile(text: str) -> dict[str, Any]:
    """Every text is this one, every number is none, or not finite."""

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one if key in FIXED else poisoned(one) for key, one in value.items()}
        if isinstance(value, list):
            return [poisoned(one) for one in value]
        return text if isinstance(value, str) else math.nan if isinstance(value, float) else value

    found: dict[str, Any] = poisoned(told())
    return found


FIXED = ("verdict", "status", "schema")


def many(count: int, name: str = "a_column_with_quite_a_long_name_that_nobody_would_give_it") -> dict[str, Any]:
    made = [column(f"{name}_{number}", f"title of {number}", 0.01 * number, 0.3) for number in range(count)]
    return told(drift=drift(columns=made))
