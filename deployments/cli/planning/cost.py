"""`headway cost` and `headway rightsize`: what runs cost, stage by stage, and whether their machines had the right size.

What a plan says that a run will cost is `headway plan`. See docs/money.md.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import aligned, in_home, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.config.planning import PriceKind
    from tasks.orchestration.run_log import LoggedRun
    from tasks.planning.money import MachinePrice
    from tasks.planning.spent import Machines, StageCost, Timed

COLUMNS = ("stage", "", "time", "machines", "machine hours", "an hour", "cost", "planned", "over")
SHOWN = 20
"""Runs that are judged when none is named."""


def cost(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="The run's ID, or its first characters; by default the newest run.")
    ] = "",
    sku: Annotated[str, typer.Option("--sku", help="The VM size to price its machines as, where they name none.")] = "",
    region: Annotated[str, typer.Option("--region", help="The Azure region whose prices to use.")] = "",
    kind: Annotated[
        str, typer.Option("--kind", help="The kind of price: on-demand, spot, reserved-1y, savings-3y, ...")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the machine hours and the actual cost of a run, stage by stage, next to its plan.

    A job costs money from the start of its machines to its end, not while it is queued; reused results cost nothing.
    Your own machines are priced by `prices/own.yaml` of the home. Where a price is unknown, so is the total.
    """
    from tasks.common.home import home
    from tasks.planning.prices.book import machine_price, open_book
    from tasks.planning.spent import costs, known_costs, timed, total

    result = _run(run)
    done = timed(result.events)
    machines = _machines(done, sku)
    today = datetime.datetime.now(datetime.UTC).date()
    prices = {  # no list of prices is read where nothing has one
        at.name: machine_price(
            open_book(home()), at.name, region="" if at.name.startswith("local") else region, today=today
        )
        for at in machines.values()
        if at.name
    }
    of_kind = _kind(kind, done)
    hours = {name: price.hours.get(of_kind) for name, price in prices.items()}
    currencies = {name: price.currency for name, price in prices.items()}
    planned = [one.metrics.get("seconds") for one in reversed(done) if one.stage == "plan"]
    stages = costs(
        done, machines, hours.get, planned_train_seconds=next(iter(planned), None), currency_of=currencies.get
    )
    known = known_costs(stages)
    several = len(known) > 1
    not_added = (
        f"prices are in {' and '.join(sorted(known))}, and no rate of exchange is known, so there is no total: "
        "write the machines' prices into prices/own.yaml in one currency"
    )
    fields = {
        **{"run": result.identity, "flow": result.handle.get("flow"), "subject": result.handle.get("subject")},
        **{"status": result.status, "kind": of_kind, "total": total(stages)},
        "known": None if several else sum(known.values()),
        "currency": None if several else next(iter((*known, *currencies.values())), "USD"),
        "by_currency": known,
        "machine_hours": sum(stage.machine_hours for stage in stages),
        "stages": [{**stage.__dict__, "over": stage.over} for stage in stages],
        "prices": [
            {
                "machine": price.sku,
                "region": price.region,
                "currency": price.currency,
                "source": price.origin(of_kind).source,
                "date": price.origin(of_kind).date or None,
                "hours": {kind: hour for kind, hour in price.hours.items() if hour is not None},
            }
            for price in prices.values()
        ],
        "warnings": [*_warnings(prices, hours, stages, of_kind), *([not_added] if several else [])],
    }
    say(fields, "\n".join(_page(fields, stages)), as_json=as_json)


def rightsize(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's ID, or its first characters; by default the newest runs.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Report for each stored training whether its machines were too small, too large or right, with the measured use."""
    from tasks.common.home import home
    from tasks.orchestration.run_log import logged_runs

    chosen = [_run(run)] if run else list(logged_runs(home()))
    rows = [row for each in chosen for row in _judged(each)][:SHOWN]
    if run and not rows:
        raise ValueError(
            f"run {chosen[0].identity[:8]} trained nothing whose folder is still there: what it used is not known"
        )
    lines = [f"{row['run'][:8]}  {row['advice']:<8} {'; '.join(row['reasons'])}" for row in rows]
    say({"runs": rows}, lines or in_home("No run that trained anything"), as_json=as_json)


def _run(identity: str) -> LoggedRun:
    """Raises ValueError where none, or more than one, begins so."""
    from tasks.common.home import home
    from tasks.orchestration.run_log import logged_runs

    results = [one for one in logged_runs(home()) if one.identity.startswith(identity)]
    if not results:
        text = f"run {identity!r}: there is no such run" if identity else "there is no run yet"
        raise ValueError(f"{text} in {home()}; `headway status` lists runs, their names are the folders of runs/")
    if identity and len(results) > 1:
        raise ValueError(
            f"run {identity!r} may be any of {', '.join(one.identity for one in results[:5])}: write more of it"
        )
    return results[0]


def _machines(done: list[Timed], sku: str) -> dict[str, Machines]:
    """By folder of the job."""
    from dataclasses import replace
    from pathlib import Path

    from tasks.report.machines_used import machines_of

    result = {one.job: machines_of(Path(one.job)) for one in done if one.job}
    named = {folder: at for folder, at in result.items() if at}
    return {f: replace(at, name=sku) if sku and not at.name.startswith("Standard") else at for f, at in named.items()}


def _kind(wanted: str, done: list[Timed]) -> PriceKind:
    """As asked for; else what the jobs' machines were: on demand, or of the tier that may be taken away."""
    from pathlib import Path

    from tasks.common.process import read_json
    from tasks.planning.money import KINDS
    from tasks.planning.spending import kind_of_preemptible

    if wanted:
        if wanted not in KINDS:
            raise ValueError(f"kind of price {wanted!r}: there is no such; write one of {', '.join(KINDS)}")
        return next(kind for kind in KINDS if kind == wanted)
    folders = [Path(one.job) for one in done if one.job]
    preemptible = [folder for folder in folders if (read_json(folder / "job.json") or {}).get("preemptible")]
    if not preemptible:
        return "on-demand"
    return kind_of_preemptible((read_json(preemptible[0] / "cluster.json") or {}).get("backend", ""))


def _warnings(
    prices: dict[str, MachinePrice], hours: dict[str, float | None], stages: list[StageCost], kind: PriceKind
) -> list[str]:
    messages = [warning for price in prices.values() for warning in price.origin(kind).warnings]
    messages += [f"{name} has no {kind} price" for name, hour in hours.items() if hour is None and prices[name].hours]
    if any(name.startswith("local") and hour is None for name, hour in hours.items()):
        messages = [warning for warning in messages if "of local-" not in warning]
        messages.append(
            "machines of your own have no price: write it into prices/own.yaml of the home, 0.0 where they cost nothing"
        )
    gone = sorted({stage.stage for stage in stages if stage.cost is None and not stage.machine})
    if gone:
        messages.append(f"of {', '.join(gone)} nobody says which machine it was: give --sku")
    return list(dict.fromkeys(messages))


def _page(fields: dict[str, Any], stages: list[StageCost]) -> Iterator[str]:
    yield f"{fields['flow']} {fields['subject']}, run {fields['run'][:8]}, {fields['status']}; {fields['kind']} prices"
    yield ""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for stage in stages:
        currency = stage.currency or fields["currency"] or ""
        hour, paid, planned = (
            "-" if value is None else f"{currency} {value:,.2f}".strip()
            for value in (stage.hour, stage.cost, stage.planned_cost)
        )
        row = (
            stage.stage,
            stage.status,
            _time(stage.seconds),
            f"{stage.machines:g} {stage.machine or '?'}" if stage.machines else "none",
            f"{stage.machine_hours:.4g}",
            hour,
            paid,
            f"{_time(stage.planned_seconds)} {planned}" if stage.planned_seconds else "",
            f"{stage.over:+.0%}" if stage.over is not None else "",
        )
        rows.append(row)
    yield from aligned(rows)
    of_each = fields["by_currency"] or {fields["currency"]: 0.0}
    least = " and ".join(f"{currency} {cost:,.2f}" for currency, cost in of_each.items())
    open_ = any(stage.cost is None for stage in stages)
    text = f"not known; at least {least}" if open_ else least
    yield f"\ntotal {text}, {fields['machine_hours']:.4g} machine hours"
    for price in fields["prices"]:
        if price["source"]:
            yield f"{price['machine']} {price['region']}: {price['source']}, {price['date'] or 'no date'}".replace(
                " :", ":"
            )
    yield from fields["warnings"]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _judged(run: LoggedRun) -> Iterator[dict[str, Any]]:
    """The trainings of a run that ran in it."""
    from dataclasses import asdict
    from pathlib import Path

    from tasks.common.home import home
    from tasks.planning.spent import judge, timed
    from tasks.report.machines_used import machines_of, used

    for one in timed(run.events):
        folder = Path(one.job)
        if one.stage != "train" or one.status not in ("ran", "failed", "cancelled") or not one.job:
            continue
        from tasks.common.process import read_json

        job, settled = read_json(folder / "job.json") or {}, read_json(folder / "settled.json") or {}
        use = used(
            folder,
            home() / "hardware",
            metrics=one.metrics,
            out_of_memory=int(job.get("smaller_batches") or 0) + (settled.get("failure") == "out_of_memory"),
        )
        at = machines_of(folder)
        if use and at:
            judged = judge(use)
            payload = {
                "machine": at.name,
                "machines": at.count,
                "advice": judged.advice,
                "reasons": list(judged.reasons),
            }
            yield {"run": run.identity, "subject": run.handle.get("subject"), **payload, "use": asdict(use)}
