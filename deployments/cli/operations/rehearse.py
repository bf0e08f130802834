"""`headway rehearse`: failures on purpose, in a home of its own. See docs/rehearsal.md."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.options import Json, Set
from deployments.cli.output import CommandError, aligned, say, visible
from tasks.common.errors import GateFailed
from tasks.common.home import home

if TYPE_CHECKING:
    from deployments.rehearsal.run import Report


def rehearse(
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", help="A YAML file, or the name of a shipped configuration (default: tiny)."),
    ] = None,
    set_: Set = None,
    dataset: Annotated[
        str, typer.Option(help="NAME or dataset/NAME@VERSION; by default the configuration's dataset.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="Inject this fault alone; may be repeated. Also random-SEED."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the faults that take long.")] = False,
    seed: Annotated[int, typer.Option(help="Where and when faults come; the same seed makes the same choices.")] = 1,
    hours: Annotated[
        float, typer.Option(min=0.0, help="Then inject several faults at once, drawn by seed, for so many hours.")
    ] = 0.0,
    report: Annotated[
        Path | None, typer.Option(help="Write the page to this file, too.", dir_okay=False, writable=True)
    ] = None,
    switch_off: Annotated[
        str, typer.Option(metavar="COMMAND", help="Switches a machine of the cluster off; {machine} is its name in it.")
    ] = "",
    switch_on: Annotated[str, typer.Option(metavar="COMMAND", help="Switches it on again.")] = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the homes of the rehearsal, with all logs, under rehearsals/ID.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the faults and what is promised; inject nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make everything go wrong that goes wrong in production, in a home of its own, and check that what is promised holds.

    It runs the lifecycle once without a fault, then what each fault needs: processes killed, checkpoints and artifacts damaged,
    an eviction, a full disk, bad data, overload. Nothing of this home's runs, models and endpoints is touched. Exit code 3:
    something that is promised did not hold.
    """
    from deployments.rehearsal import run
    from tasks.config.files import load
    from tasks.security.policy import require
    from tasks.storage import open_store

    faults = run.chosen(only or [], quick=quick)
    if list_:
        rows = [{"name": one.name, "what": one.what, "promise": one.promise, "page": one.page} for one in faults]
        listed = [line for row in rows for line in (row["name"], f"  {row['what']}", f"  {row['promise']}")]
        say({"faults": rows}, listed, as_json=as_json)
        return
    names = config or ["tiny"]
    every = run.settings_words(names, set_ or [])
    settings = load(names, every.settings)
    run.require_rehearsable(settings)
    if not settings.cluster.capabilities.this_machine:
        require(home(), "run", what=f"a rehearsal on the machines of {settings.cluster.name}")
    if bool(switch_off) != bool(switch_on):
        raise ValueError("--switch-off and --switch-on belong together: name both, or none")
    folder = home() / "rehearsals" / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    sources = run.sources_of(open_store(home()), dataset or settings.dataset, folder / "data")

    def progress(line: str) -> None:
        print(visible(line), file=sys.stderr, flush=True)

    progress(f"rehearsal {folder.name}: {len(faults)} fault{'s' * (len(faults) != 1)}, in {folder}")
    result = run.rehearse(
        folder,
        every.words,
        settings,
        sources,
        faults,
        seed=seed,
        progress=progress,
        keep=keep,
        hours=hours,
        switch=(switch_off, switch_on),
    )
    show_result(result, folder / "report.html", report, as_json=as_json)


def show_result(result: Report, page: Path, copy: Path | None, *, as_json: bool) -> None:
    """Print how the rehearsal ended; `copy` is where its page is wanted, too. Raises CommandError when something did not hold."""
    if copy:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)
    counts = ", ".join(f"{result.count(verdict)} {verdict}" for verdict in ("passed", "failed", "not tried"))
    fields = {
        **result.model_dump(mode="json", by_alias=True, exclude={"schema_"}),
        "report": str(page),
        "passed": result.passed,
    }
    table = [("fault", "verdict", "noticed", "recovered", "took")]
    for one in result.results:
        noticed, recovered = ("" if value is None else f"{value:.1f} s" for value in (one.to_notice, one.to_recover))
        table.append((one.name, one.verdict, noticed, recovered, f"{one.seconds:.0f} s"))
    words = [*aligned(table), "", f"{counts}, in {result.seconds / 60:.0f} min", f"Page: {copy or page}"]
    if result.passed:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        typer.echo("\n".join(words))
    checks = [one for each in result.results for one in each.checks] + list(result.invariants)
    broken = ", ".join(one.name for one in result.results if one.verdict == "failed") or "none of the faults alone"
    error = GateFailed(
        f"what is promised did not hold: {broken}",
        stage="rehearsal",
        checks=[one.model_dump(mode="json") for one in checks if not one.passed],
        remedy=f"{copy or page} shows what was measured; --only NAME --keep tries one again and keeps its logs.",
    )
    raise CommandError(error, fields)
