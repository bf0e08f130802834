"""Dataset against dataset, as a program: `out/drift/drift.json`. Ranks share the units that are read; rank 0 compares samples.

The parts of units that were read lie in the job's folder (`parts/`), where rank 0 waits for those of others, and a restart finds
them. What is measured and how it is judged: tasks/drift. See docs/drift.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from tasks.common.process import write_text
from tasks.config.revalidation import DriftConfig
from tasks.data.corpus.inputs import find_shards
from tasks.data.drift.comparison import PARTS, Corpus, drift_of, read_share
from tasks.jobs.node.runtime import Rank, main

FILE = "drift.json"
METRICS = {"token_divergence": "tokens", "domain_auc": "domain"}


def run(rank: Rank) -> dict[str, Any] | None:
    """Compare the inputs `new` and `reference`; an input `tokenizer` is a folder with one, or with one in `tokenizer/`."""
    out = rank.output / "drift"
    if (out / FILE).exists():  # an attempt before this one was killed after it
        return _result(json.loads((out / FILE).read_text(encoding="utf-8"))) if rank.rank == 0 else None
    reference, new = (
        Corpus(rank.settings[name], tuple(find_shards([rank.inputs[name]]))) for name in ("reference", "new")
    )
    config, share = DriftConfig.model_validate(rank.settings["drift"]), slice(rank.rank, None, rank.world_size)
    field, workers = rank.settings["text_field"], int(rank.settings["threads"])
    if rank.rank:
        read_share(reference, new, config, rank.folder, text_field=field, workers=workers, share=share)
        return None
    total, read = sum(shard.size for corpus in (reference, new) for shard in corpus.shards) / rank.world_size, 0

    def told(more: int, doing: str) -> None:
        nonlocal read
        read += more
        words = f"{read / 1e6:.1f} of {total / 1e6:.1f} MB read" if doing == "read" else f"documents are {doing}"
        rank.progress(min(read, total), total, words)

    made = drift_of(
        reference,
        new,
        config,
        rank.folder,
        tokenizer=rank.inputs.get("tokenizer"),
        text_field=field,
        workers=workers,
        report=told,
        share=share,
    )
    write_text(out / FILE, json.dumps(made, indent=1, allow_nan=False))
    for name in (PARTS, "work"):
        shutil.rmtree(rank.folder / name, ignore_errors=True)
    return _result(made)


def _result(made: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": made["verdict"], "metrics": metrics(made)}


def metrics(made: dict[str, Any]) -> dict[str, float]:
    """What is logged of a drift.json; what was not measured is left out."""
    columns = {column["name"]: column["value"] for column in made["columns"]}
    output = {"p_value": made["p_value"], **{name: columns[column] for name, column in METRICS.items()}}
    return {"documents": float(made["documents"]["new"]), **{k: float(v) for k, v in output.items() if v is not None}}


if __name__ == "__main__":
    sys.exit(main(run))
