"""One retraining run as the command line sees it: start the server, run the flow, tell what came of it.

Imports Prefect, so only `headway retrain` imports this, when it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.cli.progress import Progress
from deployments.platform import prefect_server
from tasks.artifacts import Endpoint, parse_ref
from tasks.config import RetrainConfig
from tasks.endpoints.known import require_port
from tasks.lifecycle import status_of, watched
from tasks.outcomes import Outcome
from tasks.settings import config_digest, home, tracking_uri
from tasks.storage import open_store
from tasks.storage.store import find

PUBLISH_SECONDS = 30.0


def preview_fields(name: str, config: RetrainConfig, first: str | None, last: str | None) -> dict[str, Any]:
    """What `--dry-run` prints."""
    from flows.retrain import preview

    dataset, stages = preview(name, config, first, last)
    return {"status": "completed", "dataset": dataset, "config_digest": config_digest(config), "stages": stages}


class Retraining:
    """A run from the command line."""

    def __init__(
        self, name: str, config: RetrainConfig, first: str | None, last: str | None, console: Console, *, ask: bool
    ) -> None:
        self.name, self.config, self.first, self.last, self.console, self.ask = name, config, first, last, console, ask
        self.progress = Progress(console)

    def start(self) -> BaseException | None:
        """Run to the end; what ended it early is returned, so that the fields can be told all the same."""
        try:
            preflight(self.name, self.config)
            server = prefect_server.prepare(home())
            from flows.retrain import retrain

            prefect_server.wait(server)
            with watched(self.progress, self._stop_the_job):
                retrain(self.name, self.config, self.first, self.last)
        except BaseException as error:  # noqa: BLE001 - the one place that tells of an interrupted run
            return error
        return None

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.progress.run.outcomes.values()) if self.progress.run else []

    @property
    def stopped_at(self) -> str:
        return self.progress.run.stopped_at if self.progress.run else ""

    def fields(self, error: BaseException | None) -> dict[str, Any]:
        """The command's own fields of the JSON object."""
        run = self.progress.run
        results = run.results if run else {}
        endpoint: Endpoint | None = results.get("endpoint")
        return {
            "status": status_of(error),
            "seconds": round(run.seconds, 3) if run else 0.0,
            "dataset": results.get("dataset", self.name),
            "config_digest": config_digest(self.config),
            "flow_run": run.flow_run if run else None,
            "mlflow_run": self._mlflow_run(),
            "report": results.get("report"),
            "endpoint": {"ref": endpoint.ref, "url": endpoint.url, "model": endpoint.model.ref} if endpoint else None,
            "sample": results.get("sample"),
            "stages": [_stage(outcome) for outcome in self.outcomes],
        }

    def words(self) -> str:
        """What a person reads at the end."""
        fields = self.progress.run.results if self.progress.run else {}
        endpoint: Endpoint | None = fields.get("endpoint")
        page = (self.progress.run.flow_run or {}).get("url") if self.progress.run else None
        lines = [f"Report: {fields.get('report')}", f"Flow run: {page}"]
        if endpoint:
            sample = fields["sample"]
            lines += [
                f"Endpoint {endpoint.ref}: {endpoint.url}",
                f"  headway complete {endpoint.name} {sample['prompt']!r}",
                "",
                sample["prompt"] + sample["completion"],
            ]
        return "\n".join(lines)

    def _mlflow_run(self) -> dict[str, Any] | None:
        """MLflow's id of the run; its page, when a tracking server is named (a database file has no page)."""
        run = self.progress.run
        if not run or not run.spool or not run.run:
            return None
        known = run.spool.published(timeout=PUBLISH_SECONDS).get(run.run)
        if not known:
            self.console.print("MLflow is behind; what it misses is kept, `headway lineage --sync` tells it.")
            return None
        base = tracking_uri()
        url = f"{base}/#/experiments/{known['experiment']}/runs/{known['id']}" if base.startswith("http") else None
        return {"id": known["id"], "url": url}

    def _stop_the_job(self) -> bool:
        """After Ctrl-C on a terminal: whether the running job stops as well. After SIGTERM, or without a terminal, it does."""
        self.progress.quiet()
        if not self.ask or type(sys.exception()) is not KeyboardInterrupt:
            return True
        question = "\nStop the running job too? If it goes on, the same command adopts it later. [y/N] "
        self.console.print(question, end="", markup=False)
        try:
            return input().strip().lower() in ("y", "yes")
        except EOFError:
            return False


def preflight(name: str, config: RetrainConfig) -> None:
    """What can be known to be wrong before anything is spent: the dataset, the port, the baseline."""
    from tasks.benchmark import load_baseline

    base = home()
    find(open_store(base), *parse_ref(name, kind="dataset"))
    load_baseline(config.benchmark.baseline)
    require_port(base, config.deployment.endpoint, config.deployment.port)
    base.mkdir(parents=True, exist_ok=True)
    Path(base / ".gitignore").write_text("*\n")


def _stage(outcome: Outcome) -> dict[str, Any]:
    told = ("name", "status", "seconds", "key", "inputs", "outputs", "metrics", "job")
    return {key: value for key, value in outcome.plain().items() if key in told}
