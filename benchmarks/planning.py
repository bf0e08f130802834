"""Predicted against published throughput: how far the plan's model of a step is from runs that others measured.

    python -m benchmarks.planning [--rows] [--fit] [--cross-validate]

Cases with their sources are benchmarks/planning_cases.yaml. The table gives, for each source, the median and the worst error of
predicted over published throughput and the share within a quarter; with `--rows`, each row and what its step is made of. `--fit`
finds the numbers of tasks/planning/prediction.py that say "Fitted" again and prints them: least squares of the logarithm of
predicted over published, each source as heavy as the square root of its rows, so that no table of fifty rows rules, around what
each was judged to be (`PRIORS`, set after a first look at the table). `--cross-validate` fits without one paper after the other
and predicts that paper. Goals for those: median within 8 %, nine in ten within 20 %. By `make bench`, without the fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.hardware.machines import Machine, machine_of_gpu
from tasks.planning import counts, steps
from tasks.planning.case import Network
from tasks.planning.prediction import DEFAULT, Constants, Divided, Division, StepTime

CASES = Path(__file__).with_name("planning_cases.yaml")


@dataclass(frozen=True)
class Prior:
    """What a constant is judged to be apart from the fit, and how sure that is. Set when a first table had been seen."""

    value: float
    deviation: float
    most: float = 1.0


PRIORS = {
    "sustained": Prior(0.92, 0.04),
    "matmul_ridge": Prior(0.8, 0.25, most=3.0),
    "memory_efficiency": Prior(0.75, 0.08),
    "flash_efficiency": Prior(0.62, 0.08),
    "flash_efficiency_torch": Prior(0.35, 0.1),
    "unfused": Prior(1.7, 0.4, most=4.0),
    "tensor_exposed": Prior(0.6, 0.15),
    "overlap": Prior(0.9, 0.1),
    "contention": Prior(0.15, 0.08),
    "straggling": Prior(0.01, 0.004),
}
"""What is fitted. One deviation from its prior costs a constant as much as ten percent cost a source: so a number that the runs
say little of stays where it makes sense."""
TOLERATED = 0.1
NEAR = 0.25


@dataclass(frozen=True)
class Run:
    """One published run."""

    source: str
    paper: str
    """Several sources may be of one."""
    name: str
    network: Network
    division: Division
    machine: Machine
    sequence: int
    global_batch: int
    flash_attention: bool
    seconds: float
    """Published, of one step."""
    fitted: bool = True
    """Whether constants are fitted to it too."""

    def predicted(self, constants: Constants = DEFAULT) -> StepTime:
        of = Divided(self.network, self.division, self.sequence, self.global_batch, self.flash_attention)
        return steps.step_time(of, self.machine, constants)

    def ratio(self, constants: Constants = DEFAULT) -> float:
        """Predicted over published throughput: over 1 is a plan that promises too much."""
        return self.seconds / self.predicted(constants).total


def read(path: Path = CASES) -> list[Run]:
    """ValueError when a row has not as many values as columns."""
    found = []
    for source in yaml.safe_load(path.read_text())["sources"]:
        machine = dataclasses.replace(machine_of_gpu(source["gpu"]), **source.get("machine", {}))
        for row in source["rows"]:
            fields = source["common"] | dict(zip(source["columns"], row, strict=True))
            run = _run(source["name"], source["counts"], fields, machine)
            paper, fitted = source.get("paper", run.source), source.get("fitted", True)
            found.append(dataclasses.replace(run, paper=paper, fitted=fitted))
    return found


def _run(source: str, counted: str, fields: dict[str, Any], machine: Machine) -> Run:
    named = dict(fields)
    name, published, gpus = str(named.pop("name")), named.pop("published"), named.pop("gpus")
    sequence, batch = named.pop("sequence"), named.pop("global")
    flash = named.pop("flash_attention", True)
    network = Network(**{key: named.pop(key) for key in list(named) if key in Network.model_fields})
    ranks = named.get("tp", 1) * named.get("pp", 1) * named.get("cp", 1)
    division = Division(dp=gpus // ranks, **named)
    if division.gpus != gpus or batch % (division.dp * division.micro):
        raise ValueError(f"{source}, {name}: {gpus} GPUs and a batch of {batch} do not divide as the row says")
    return Run(
        source=source,
        paper=source,
        name=name,
        network=network,
        division=division,
        machine=machine,
        sequence=sequence,
        global_batch=batch,
        flash_attention=flash,
        seconds=_seconds(counted, published, network, sequence=sequence, batch=batch, gpus=gpus),
    )


def _seconds(counted: str, published: float, network: Network, *, sequence: int, batch: int, gpus: int) -> float:
    """Of a step, from what the source counts."""
    if counted == "seconds":
        return published
    if counted == "tokens":
        return batch * sequence / gpus / published
    operations = {
        "tflops_96": counts.flops_96,
        "tflops_72": counts.flops_72,
        "tflops_model": lambda *sizes: counts.flops(*sizes).model,
        "tflops_6n": lambda *sizes: counts.flops(*sizes).six_n,
    }[counted](network, sequence, batch)
    return operations / (published * 1e12 * gpus)


def fit(runs: Sequence[Run], start: Constants = DEFAULT) -> Constants:
    """Constants that bring predicted and published times nearest, over all runs; far rows pull no harder than near ones."""
    from scipy.optimize import least_squares

    runs = [run for run in runs if run.fitted]
    sizes = {source: len(own) for source, own in by_source(runs).items()}

    def residuals(values: Sequence[float]) -> list[float]:
        tried = dataclasses.replace(start, **dict(zip(PRIORS, map(float, values), strict=True)))
        errors = [math.log(run.ratio(tried)) / sizes[run.source] ** 0.25 for run in runs]
        moved = zip(values, PRIORS.values(), strict=True)
        return errors + [TOLERATED * (float(value) - prior.value) / prior.deviation for value, prior in moved]

    upper = [prior.most for prior in PRIORS.values()]
    first = [prior.value for prior in PRIORS.values()]
    found = least_squares(
        residuals, first, bounds=([0.0] * len(upper), upper), loss="soft_l1", f_scale=TOLERATED, diff_step=1e-3
    )
    return dataclasses.replace(start, **dict(zip(PRIORS, map(float, found.x), strict=True)))


def summary(ratios: Sequence[float]) -> str:
    """Median and worst error, what nine in ten are within, and whether the plan promises too much or too little."""
    errors = [abs(ratio - 1) for ratio in ratios]
    near = sum(error <= NEAR for error in errors) / len(errors)
    nine = sorted(errors)[math.ceil(0.9 * len(errors)) - 1]
    return (
        f"{len(ratios):4d} rows  median error {statistics.median(errors):6.1%}  nine in ten {nine:6.1%}  "
        f"worst {max(errors):6.1%}  within 25 % {near:4.0%}  median ratio {statistics.median(ratios):.2f}"
    )


def by_source(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.source, []).append(run)
    return found


def table(runs: Sequence[Run], constants: Constants = DEFAULT, *, rows: bool = False) -> None:
    for source, own in by_source(runs).items():
        print(f"{source:28s} {summary([run.ratio(constants) for run in own])}")
        for run in own if rows else ():
            time, ratio = run.predicted(constants), run.ratio(constants)
            parts = "  ".join(
                f"{name} {part / time.total:.0%}" for name, part in time.__dict__.items() if part > 0.03 * time.total
            )
            mark = "  far" if abs(ratio - 1) > NEAR else ""
            print(
                f"    {run.name:28s} published {run.seconds:8.3f} s  predicted {time.total:8.3f} s  {ratio:4.2f}{mark}  {parts}"
            )
    print(f"{'all':28s} {summary([run.ratio(constants) for run in runs])}")


def cross_validate(runs: Sequence[Run]) -> list[float]:
    """Predict each paper by constants that did not see it, and print how well; the ratios of all rows."""
    everything = []
    for paper in dict.fromkeys(run.paper for run in runs):
        without = fit([run for run in runs if run.paper != paper])
        ratios = [run.ratio(without) for run in runs if run.paper == paper]
        everything += ratios
        print(f"{paper:28s} {summary(ratios)}")
    print(f"{'all, unseen':28s} {summary(everything)}")
    return everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="each run, and what its step is made of")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument(
        "--cross-validate", action="store_true", help="predict each paper by constants fitted without it"
    )
    asked = parser.parse_args()
    runs = read()
    constants = fit(runs) if asked.fit else DEFAULT
    if asked.fit:
        print("\n".join(f"{name} = {getattr(constants, name):.4g}" for name in PRIORS))
    table(runs, constants, rows=asked.rows)
    if asked.cross_validate:
        cross_validate(runs)


if __name__ == "__main__":
    main()
