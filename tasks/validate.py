"""Dataset -> Validation: is this corpus fit to be trained on? Great Expectations judges; this is its only home.

The corpus is streamed once into a profile of one row a document; the suite runs on the profile. What a document is:
tasks/formats/documents.py. See docs/stages.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Check, Dataset, Validation
from tasks.data_config import ValidationConfig
from tasks.formats.documents import Document, read_documents
from tasks.stage import stage
from tasks.workbench import fetch, publish, scratch

LENGTH_BINS = 30
CLASSES = ("letters", "digits", "space", "punctuation", "other")
ALLOWED_CONTROL = b"\t\n\r"


@stage(version=1)
def validate(dataset: Dataset, config: ValidationConfig) -> Validation:
    """Profile a dataset and judge it by the suite."""
    rows, classes = profile(read_documents(fetch(dataset), config.text_field))
    checks = judge(rows, config)
    with scratch() as folder:
        (folder / "validation.json").write_text(json.dumps(_summary(rows, classes, checks), indent=1))
        documents = len(rows["characters"])
        return publish(
            folder,
            Validation,
            name=dataset.name,
            metrics={"documents": float(documents), "bytes": float(sum(rows["bytes"]))},
            checks=checks,
            subject=dataset,
        )


def profile(documents: Iterable[Document]) -> tuple[dict[str, list[Any]], NDArray[np.int64]]:
    """One row a document (characters, bytes, shares, duplicate), and bytes by class over the corpus, shape [5]."""
    rows: dict[str, list[Any]] = {name: [] for name in ("characters", "bytes", "control", "replacement", "duplicate")}
    seen: set[bytes] = set()
    histogram = np.zeros(256, dtype=np.int64)
    for document in documents:
        data = document.text.encode()
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        histogram += counts
        content = hashlib.sha256(data).digest()[:16]
        rows["characters"].append(len(document.text))
        rows["bytes"].append(len(data))
        rows["control"].append(float(counts[_CONTROL].sum()) / max(len(data), 1))
        rows["replacement"].append(document.text.count("\ufffd") / max(len(document.text), 1))
        rows["duplicate"].append(content in seen)
        seen.add(content)
    return rows, np.array([histogram[_class_of == index].sum() for index in range(len(CLASSES))])


def judge(rows: dict[str, list[Any]], config: ValidationConfig) -> tuple[Check, ...]:
    """Run the suite on a profile: one check an expectation."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    import pandas as pd

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("corpus").add_dataframe_asset("profile")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": pd.DataFrame(rows)})
    suite = gx.ExpectationSuite(name="corpus", expectations=_expectations(gx.expectations, config))
    results = batch.validate(suite, result_format="BASIC").results
    found = {result.expectation_config.meta["name"]: result for result in results}
    return tuple(_check(name, found[name]) for name in found)


def _expectations(gxe: Any, config: ValidationConfig) -> list[Any]:
    def values(name: str, column: str, share: float, remedy: str, **limits: float) -> Any:
        meta = {"name": name, "limit": f"<= {share:.2%} of documents", "remedy": remedy}
        return gxe.ExpectColumnValuesToBeBetween(column=column, mostly=1 - share, meta=meta, **limits)

    count = {"name": "documents", "limit": f">= {config.min_documents}", "remedy": "Publish more documents."}
    once = {
        "name": "exact duplicates",
        "limit": f"<= {config.max_duplicate_share:.2%} of documents",
        "remedy": "Remove repeated documents, or raise validation.max_duplicate_share.",
    }
    encoding = "Is it text, and UTF-8? Publish it decoded."
    bad = config.max_bad_documents
    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=config.min_documents, meta=count),
        values(
            "too short", "characters", config.max_short_share, "Drop short documents.", min_value=config.min_characters
        ),
        values(
            "too long", "characters", config.max_long_share, "Split long documents.", max_value=config.max_characters
        ),
        values("control characters", "control", bad, encoding, max_value=config.max_control_share),
        values("replacement characters", "replacement", bad, encoding, max_value=config.max_replacement_share),
        gxe.ExpectColumnValuesToBeInSet(
            column="duplicate", value_set=[False], mostly=1 - config.max_duplicate_share, meta=once
        ),
    ]


def _check(name: str, result: Any) -> Check:
    meta, found = result.expectation_config.meta, result.result
    measured = found["observed_value"] if "observed_value" in found else _share(found)
    return Check(
        name=name, measured=float(measured), limit=meta["limit"], passed=bool(result.success), remedy=meta["remedy"]
    )


def _share(found: dict[str, Any]) -> float:
    unexpected, elements = int(found.get("unexpected_count", 0)), int(found.get("element_count", 0))
    return unexpected / max(elements, 1)


def _summary(rows: dict[str, list[Any]], classes: NDArray[np.int64], checks: tuple[Check, ...]) -> dict[str, Any]:
    lengths = np.asarray(rows["characters"] or [0])
    edges = np.unique(np.geomspace(max(lengths.min(), 1), max(lengths.max(), 2), LENGTH_BINS + 1).round())
    counts, _ = np.histogram(np.maximum(lengths, 1), edges)
    shares = classes / max(classes.sum(), 1)
    return {
        "documents": len(rows["characters"]),
        "characters": int(sum(rows["characters"])),
        "bytes": int(sum(rows["bytes"])),
        "duplicates": int(sum(rows["duplicate"])),
        "lengths": {"edges": edges.tolist(), "counts": counts.tolist()},
        "classes": dict(zip(CLASSES, shares.tolist(), strict=True)),
        "checks": [check.model_dump() for check in checks],
    }


def _classify(byte: int) -> int:
    character = chr(byte)
    if byte >= 128 or byte in _CONTROL_BYTES:
        return CLASSES.index("other")
    if character.isalpha():
        return CLASSES.index("letters")
    if character.isdigit():
        return CLASSES.index("digits")
    return CLASSES.index("space" if character.isspace() else "punctuation")


_CONTROL_BYTES = frozenset(byte for byte in (*range(32), 127) if byte not in ALLOWED_CONTROL)
_CONTROL = np.array(sorted(_CONTROL_BYTES))
_class_of = np.array([_classify(byte) for byte in range(256)])
