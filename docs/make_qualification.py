"""Draws docs/images/qualification.png: the page of 64 invented machines, one of them slow. Needs Chromium.

python docs/make_qualification.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from qualification_material import SKU, sample  # noqa: E402

from tasks.config.qualification import BenchmarkConfig  # noqa: E402
from tasks.qualification.judge import judge  # noqa: E402
from tasks.qualification.measured import Measurement  # noqa: E402
from tasks.qualification.remaining import remaining  # noqa: E402
from tasks.report.qualification.report import write_qualification  # noqa: E402

MACHINES, SIZE = 64, (1200, 1800)
PICTURE = ROOT / "docs" / "images" / "qualification.png"


def judged() -> dict[str, Any]:
    """What the stage would publish."""
    told = sample(MACHINES, faults=("slow",))
    config = BenchmarkConfig(depth="full", checks=("compute", "memory", "collectives", "pairs"))
    verdict = judge(Measurement.model_validate(told["measured"]), SKU, config)
    left = remaining(verdict, config, MACHINES - 1)
    said = verdict.model_copy(update={"verdict": left.verdict})
    return {**told, "verdict": said.model_dump(mode="json"), "remaining": left.model_dump(mode="json")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = write_qualification(Path(folder), judged())
        window = f"--window-size={SIZE[0]},{SIZE[1]}"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/chromium", window]
        subprocess.run(
            ["chromium", *options, f"--screenshot={PICTURE}", page.as_uri()], check=True, capture_output=True
        )


if __name__ == "__main__":
    main()
