"""Smaller variants that lie in an exported model's folder, as what a server may fall back on. Pure.

What makes them is tasks/jobs/exporting/variants.py, what answers with them tasks/jobs/serving/fallback_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "variants"


def smaller_rungs(
    model_folder: Path, model_ref: str, files: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The variants that an export put beside the model, as rungs of serve.json; the largest first.

    `files` are the model's, as its manifest has them. None: nobody says what they must be, of the variants neither.
    """
    results = []
    for folder in (model_folder / FOLDER).glob("*/"):
        prefix = f"{FOLDER}/{folder.name}/"
        rung: dict[str, Any] = {"name": "smaller", "model_ref": f"{model_ref}/{prefix[:-1]}", "folder": str(folder)}
        if files is None:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            results.append((size, {**rung, "files": None}))
            continue
        own = [
            {**file, "path": str(file["path"]).removeprefix(prefix)}
            for file in files
            if str(file["path"]).startswith(prefix)
        ]
        results.append((sum(int(file["size"]) for file in own), {**rung, "files": own}))
    return [rung for _, rung in sorted(results, key=lambda one: -one[0])]
