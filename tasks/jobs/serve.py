"""Program `tasks.jobs.serve`: one model behind HTTP, with OpenAI's completions for a shape.

The folder named by HEADWAY_SERVE holds `serve.json` (`ServeSettings` of serving/program.py). At each start every byte of the
model is compared with `files`; a difference ends it, and its parent does not try again. The server is put together in
serving/program.py; starting, switching and stopping servers is in tasks/serving.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.common.process import write_json
from tasks.jobs.serving.program import Program

log = logging.getLogger("headway.serve")


def main(folder: Path, *, collector: str = "") -> None:
    """Serve a folder. What starting again cannot mend is written down for the parent, which then leaves it."""
    try:
        asyncio.run(Program(folder, collector=collector).run())
    except* (IntegrityError, ValueError) as group:
        error = group.exceptions[0]
        kind, code = ("integrity", IntegrityError.exit_code) if isinstance(error, IntegrityError) else ("user", 2)
        (folder / "errors").mkdir(exist_ok=True)
        attempt = int(os.environ.get("HEADWAY_ATTEMPT", "1"))
        write_json(folder / "errors" / "serve.json", {"class": kind, "message": str(error), "attempt": attempt})
        log.error("%s", error)
        raise SystemExit(code) from None


if __name__ == "__main__":
    main(Path(os.environ["HEADWAY_SERVE"]), collector=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
