"""A flow run from the command line: start the server, run the flow in this process, print the result. For all flows.

Imports Prefect, so a command imports this when it is needed.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from deployments.cli.output import CommandError, say, short_ref
from deployments.cli.progress import Progress, console, summary
from deployments.services import prefect_server
from tasks.common.home import home
from tasks.config.base import Settings, config_digest
from tasks.lineage.messages import run_page
from tasks.orchestration.observers import Outcome, status_of
from tasks.orchestration.result import RunResult
from tasks.orchestration.run import Lifecycle, watched

PUBLISH_SECONDS = 30.0


class Running:
    """A run of a flow. `flow` is flows.FLOW.FLOW, `arguments` what it is called with besides its configuration."""

    def __init__(self, flow: str, config: Settings, arguments: dict[str, Any], out: Console, *, ask: bool) -> None:
        self.flow, self.config, self.arguments, self.console, self.ask = flow, config, arguments, out, ask
        self.progress = Progress(out)

    def start(self, preflight: Callable[[], None]) -> BaseException | None:
        """Run to the end; what ended it early is returned, so that the fields can be printed all the same."""
        try:
            preflight()
            make_home()
            self.progress.started("start", None)
            self.progress.progress("start", 0, 0, "Prefect's server, and the flow", None)
            server = prefect_server.prepare(home())
            flow = getattr(importlib.import_module(f"flows.{self.flow}"), self.flow)
            prefect_server.wait(server, lambda text: self.progress.progress("start", 0, 0, text, None))
            quick = prefect_server.without_heartbeats() if server["ours"] else nullcontext()
            with quick, watched(self.progress, lambda: job_may_stop(self.progress, ask=self.ask)):
                flow(**self.arguments, config=self.config)
        except BaseException as error:  # noqa: BLE001 - the one place that tells of an interrupted run
            return error
        finally:
            self.progress.quiet()
        return None

    @property
    def run(self) -> Lifecycle | None:
        """The lifecycle, once it is open."""
        return self.progress.run

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.run.outcomes.values()) if self.run else []

    def fields(self, error: BaseException | None, *, as_json: bool) -> dict[str, Any]:
        """The command's own fields of the JSON object, which alone waits for MLflow."""
        result = self.run.result if self.run else RunResult()
        shown = {"name", "status", "seconds", "key", "inputs", "outputs", "metrics", "job"}
        stages = [{k: v for k, v in outcome.plain().items() if k in shown} for outcome in self.outcomes]
        return {
            "status": status_of(error),
            "seconds": round(self.run.seconds, 3) if self.run else 0.0,
            "config_digest": config_digest(self.config),
            "flow_run": self.run.flow_run if self.run else None,
            "mlflow_run": self._mlflow_run(wait=as_json),
            "report": result.report,
            **result.plain(self.flow, dataset=self.arguments.get("dataset")),
            "stages": stages,
        }

    def words(self) -> str:
        """What the terminal shows at the end."""
        result = self.run.result if self.run else RunResult()
        page = (self.run.flow_run or {}).get("url") if self.run else None
        lines = [f"Report: {result.report}", f"Flow run: {page}{prefect_server.login_of(home())}"]
        if endpoint := result.endpoint:
            lines += [f"Endpoint {endpoint.ref}: {endpoint.url}", ""]
            from tasks.deploy import SAMPLING

            # Each with the command that gives the same sample again.
            drawn = f"--max-tokens {SAMPLING.max_tokens} --temperature {SAMPLING.temperature} --top-p {SAMPLING.top_p}"
            drawn += f" --seed {SAMPLING.seed}"
            for each in result.samples or ():
                command = f"$ headway complete {endpoint.name} {shlex.quote(each['prompt'])} {drawn}"
                lines += [command, each["prompt"] + each["completion"], ""]
            lines.append("Next:")
            if not shutil.which("headway"):
                # The file that puts this installation's commands on the path of a shell.
                script, folder = Path(sys.prefix) / "bin" / "activate", Path.cwd()
                lines.append(f"  source {script.relative_to(folder) if script.is_relative_to(folder) else script}")
            lines += [f"  headway complete {endpoint.name} 'TEXT'", f"  headway lineage {short_ref(endpoint.ref)}"]
            lines += ["  headway up --detach", "", "The endpoint keeps running. To stop it: headway down --endpoints"]
        return "\n".join(lines)

    def _mlflow_run(self, *, wait: bool) -> dict[str, Any] | None:
        """MLflow's id of the run; its page, when a server shows it. The publisher of a run that was short may not have it yet."""
        run = self.run
        if not run or not run.spool or not run.run:
            return None
        known = run.spool.published(timeout=PUBLISH_SECONDS if wait else 0.0).get(run.run)
        if not known:
            if wait or run.seconds > PUBLISH_SECONDS:
                self.console.print(
                    "MLflow is behind; what it lacks is kept, and `headway lineage --sync` publishes it."
                )
            return None
        return {"id": known["id"], "url": run_page(run.home, run.spool.folder, run.run)}


def job_may_stop(progress: Progress, *, ask: bool) -> bool:
    """After Ctrl-C on a terminal: whether the running job stops as well. After SIGTERM, or without a terminal, it does."""
    progress.quiet()
    if not ask or type(sys.exception()) is not KeyboardInterrupt:
        return True
    question = "\nStop the running job too? If you leave it running, the same command adopts it later. [y/N] "
    progress.console.print(question, end="", markup=False)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def run_and_tell(
    flow: str,
    config: Settings,
    arguments: dict[str, Any],
    *,
    preflight: Callable[[], None],
    as_json: bool,
    show: Callable[[dict[str, Any]], RenderableType] | None = None,
) -> None:
    """Run a flow in this process, and print what came of it. Raises CommandError when it did not complete.

    `preflight` raises what can be known to be wrong before anything is spent; `show` makes what people see below the stages.
    """
    out = console()
    running = Running(flow, config, arguments, out, ask=sys.stdin.isatty() and sys.stderr.isatty())
    error = running.start(preflight)
    fields = running.fields(error, as_json=as_json)
    if running.outcomes:
        out.print()
        if len(running.outcomes) > 1:  # of a single stage, its own line has said all of it
            out.print(summary(running.outcomes))
        if show:
            out.print(show(fields))
    if error is not None:
        if fields["report"]:
            out.print(f"Report: {fields['report']}", markup=False, highlight=False, soft_wrap=True)
        raise CommandError(error, fields, running.run.stopped_at if running.run else "") from error
    say(fields, running.words(), as_json=as_json)


def make_home() -> None:
    """The state is nobody's source code."""
    home().mkdir(parents=True, exist_ok=True)
    Path(home() / ".gitignore").write_text("*\n")
