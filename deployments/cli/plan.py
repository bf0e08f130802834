"""`headway plan`: whether a training fits, how fast, how long, what it costs, before anything is spent. See docs/planning.md.

Reading cases and showing plans; what is planned is tasks/planning/planned_case.py, what a lifecycle's configuration asks for,
tasks/planning/case_of_config.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.checks import Config, Set
from deployments.cli.output import say, say_list

if TYPE_CHECKING:
    from tasks.planning.case import Case
    from tasks.planning.planned_case import Planned

MOST_BYTES = 1 << 20
MOST_CASES = 500
CaseFile = Annotated[
    str,
    typer.Option("--case", metavar="FILE", help="A YAML file with one case or several, in place of a configuration."),
]


def plan(
    config: Config = None,
    set_: Set = None,
    case: CaseFile = "",
    goal: Annotated[str, typer.Option(metavar="GOAL", help="fastest, cheapest or smallest; else the case's.")] = "",
    region: Annotated[
        str, typer.Option("--region", help="Azure's region, for prices; else the usual one of the list.")
    ] = "",
    write: Annotated[
        str, typer.Option(metavar="FILE", help="Write the division as settings that `-c FILE` takes.")
    ] = "",
    plots: Annotated[
        str,
        typer.Option(metavar="DIR", help="Draw what if: other numbers of GPUs, Spot, depths, intervals. Seconds more."),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON on stdout: one object, of several cases a list.")
    ] = False,
) -> None:
    """Plan a training: does it fit, how fast, how long, what does it cost, what will break. Starts nothing, needs no GPU.

    Of a configuration (-c), or of a case by itself (--case): network, sequence, cluster, batch; what `parallel` leaves out is
    searched.
    """
    from deployments.configuration.files import load
    from tasks.common.home import home
    from tasks.planning.case_of_config import case_of
    from tasks.planning.planned_case import plain, planned
    from tasks.planning.spending import paid_for

    bandwidth, paid, hours = 0.0, None, None
    if case:
        cases = read_cases(Path(case))
    else:
        settings = load(config or "local", set_ or [])
        if not settings.cluster.gpus_per_node and not (goal or write or plots):
            from deployments.cli.plan_measured import say_measured

            if say_measured(settings, as_json=as_json):
                return
        cases, bandwidth = [case_of(settings, search=bool(goal))], _measured(settings.cluster.name)
        paid = paid_for(settings.planning.spending, settings.cluster)
        region = region or paid.region
        hours = settings.planning.mean_hours_between_failures
    cases = [_with_goal(each, goal) for each in cases]
    made = [
        _named(
            each,
            lambda one: planned(
                one,
                home=home(),
                region=region,
                paid=paid,
                allreduce_bus_bandwidth=bandwidth,
                hours_between_failures=hours,
            ),
        )
        for each in cases
    ]
    told = [plain(each) for each in made]
    if write:
        _write(made, Path(write))
    if plots:
        from deployments.cli.plan_plots import draw

        draw(made, Path(plots), home=home(), region=region)
    words = "\n\n".join(_page(each, shown) for each, shown in zip(made, told, strict=True))
    if len(told) > 1:
        say_list(told, words, as_json=as_json)
    else:
        say(told[0], words, as_json=as_json)


def read_cases(path: Path) -> list[Case]:
    """A file's cases: one, a list, `cases: [...]`, or several documents. Raises ValueError with file, key and value."""
    import yaml
    from pydantic import ValidationError

    from deployments.configuration.yaml_errors import Loader, sentence
    from tasks.planning.case import Case

    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(
                f"--case {str(path)!r}: {path.stat().st_size} bytes; a file of cases has at most {MOST_BYTES}"
            )
        documents = [said for said in yaml.load_all(path.read_text(encoding="utf-8"), Loader) if said is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--case {str(path)!r}: {error}") from error
    found = [one for said in documents for one in _listed(said)]
    if not 0 < len(found) <= MOST_CASES:
        raise ValueError(
            f"--case {str(path)!r}: {len(found)} cases; give 1 to {MOST_CASES}, each with network, sequence, cluster, batch"
        )
    cases = []
    for number, said in enumerate(found, start=1):
        try:
            cases.append(Case.model_validate(said))
        except ValidationError as error:
            named = said.get("name") if isinstance(said, dict) else None
            words = sentence(error.errors()[0], Case)
            raise ValueError(f"{path}, case {named or number}: {words}") from error
    return cases


def _listed(said: Any) -> Iterable[Any]:
    if isinstance(said, dict) and set(said) == {"cases"}:
        said = said["cases"]
    return said if isinstance(said, list) else [said]


def _measured(cluster: str) -> float:
    """Bus bandwidth, bytes a second, that the cluster's newest qualification measured over all machines; 0: there is none."""
    from tasks.common.errors import Unknown
    from tasks.common.home import home
    from tasks.storage import open_store
    from tasks.storage.store import find

    try:
        found = find(open_store(home()), "qualification", cluster)
    except Unknown:
        return 0.0
    return 1e9 * found.provenance.metrics.get("allreduce_gigabytes_per_second", 0.0)


def _with_goal(case: Case, goal: str) -> Case:
    if not goal:
        return case
    from typing import get_args

    from tasks.planning.case import Goal

    if goal not in get_args(Goal):
        raise ValueError(f"--goal {goal!r}: give one of {', '.join(get_args(Goal))}")
    return case.model_copy(update={"goal": goal})


def _write(made: list[Planned], path: Path) -> None:
    import yaml

    from tasks.planning.case_of_config import settings_of

    if len(made) != 1 or made[0].plan is None:
        raise ValueError(
            f"--write {str(path)!r}: {len(made)} cases, or one that does not fit: one plan is written that fits"
        )
    path.write_text(
        yaml.safe_dump(settings_of(made[0].plan.division, made[0].plan.needs), sort_keys=False), encoding="utf-8"
    )


def _named(case: Case, make: Any) -> Planned:
    """A mistake of one case of many says of which."""
    try:
        return make(case)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(f"{case.name}: {error}" if case.name else str(error)) from error


def _page(made: Planned, told: dict[str, Any]) -> str:
    """The plan for people."""
    from deployments.cli.plan_page import page

    return page(made, told)
