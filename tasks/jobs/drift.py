"""Dataset against dataset, as a program: `out/drift/drift.json`. One rank; its processes share the reading and the measuring.

What is measured and how it is judged: tasks/drift. See docs/drift.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from tasks.config.revalidation import DriftConfig
from tasks.data.corpus.inputs import find_shards
from tasks.data.drift.comparison import Corpus, drift_of
from tasks.jobs.node.runtime import Rank, main

METRICS = {"token_divergence": "tokens", "domain_auc": "domain"}


def run(rank: Rank) -> dict[str, Any]:
    """Compare the inputs `new` and `reference`; an input `tokenizer` is a folder with one, or with one in `tokenizer/`."""
    work, out = rank.folder / "work", rank.output / "drift"
    shutil.rmtree(work, ignore_errors=True)
    reference, new = (
        Corpus(rank.settings[name], tuple(find_shards([rank.inputs[name]]))) for name in ("reference", "new")
    )
    total, read = sum(shard.size for corpus in (reference, new) for shard in corpus.shards), 0

    def told(more: int, doing: str) -> None:
        nonlocal read
        read += more
        words = f"{read / 1e6:.0f} of {total / 1e6:.0f} MB read" if doing == "read" else f"documents are {doing}"
        rank.progress(min(read, total), total, words)

    made = drift_of(
        reference,
        new,
        DriftConfig.model_validate(rank.settings["drift"]),
        work,
        tokenizer=rank.inputs.get("tokenizer"),
        text_field=rank.settings["text_field"],
        workers=int(rank.settings["threads"]),
        report=told,
    )
    shutil.rmtree(work)
    out.mkdir(exist_ok=True)
    (out / "drift.json").write_text(json.dumps(made, indent=1, allow_nan=False), encoding="utf-8")
    return {"verdict": made["verdict"], "metrics": metrics(made)}


def metrics(made: dict[str, Any]) -> dict[str, float]:
    """What is logged of a drift.json; what was not measured is left out."""
    columns = {column["name"]: column["value"] for column in made["columns"]}
    output = {"p_value": made["p_value"], **{name: columns[column] for name, column in METRICS.items()}}
    return {"documents": float(made["documents"]["new"]), **{k: float(v) for k, v in output.items() if v is not None}}


if __name__ == "__main__":
    sys.exit(main(run))
