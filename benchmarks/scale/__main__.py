"""What a corpus of ten terabytes costs: `validate`, with near duplicates, and `preprocess` on 1, 8 and 64 machines, simulated.

    python -m benchmarks.scale [--terabytes T] [--shard-megabytes M] [--machines N ...] [--cores N] [--megabytes N]
    python -m benchmarks.scale --real GB [--megabytes N]

Work on bytes costs what it costs here, measured in this call on a generated corpus of --megabytes (rates.py). Lists, units,
receipts, ranges of hashes and manifests are gone through by the product's own code on as many names of the right sizes, a tenth
of the corpus beside the whole (names.py). A virtual clock shares units out as the product does, and adds stages up (chain.py).
Bandwidths are settings. *superlinear*: the whole took more than eleven times the tenth. The exit code is 1 when a limit does
not hold.

--real runs both commands on a corpus of so many GB on this machine, and compares processor time, time, memory and bytes that
were read and written with what the simulation says of the same corpus and one machine of this one's cores. What every command
costs whatever its corpus, as Prefect does, is taken from a run on the small corpus. Run by `make bench`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

from benchmarks.scale import rates, real
from benchmarks.scale.chain import Corpus, Model, Rates
from benchmarks.scale.clock import Machines, Where, superlinear
from benchmarks.scratch import scratch

MOST_HOURS, MOST_RANK, MOST_LAUNCHER = 4.0, 32e9, 1e9
GOAL = (8, 64)
"""Machines, and cores of each, that the hours are of."""
ROLES = ("make", "rank", "first", "launcher", "tokens")
OFTEN = 500_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terabytes", type=float, default=10)
    parser.add_argument("--shard-megabytes", type=float, default=1000)
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--network", type=float, default=30, help="Gbit/s of a machine; 30 is Azure's Standard_D64s_v5")
    parser.add_argument(
        "--files", type=float, default=50, help="Gbit/s of the file system or the storage account, all together"
    )
    parser.add_argument("--megabytes", type=float, default=200, help="of the corpus that rates are measured on")
    parser.add_argument("--names", type=Path, help="what an earlier call measured on names: the JSON that it printed")
    parser.add_argument("--scratch", type=Path, help="where files are made; a file system in memory is faster")
    parser.add_argument("--real", type=float, metavar="GB")
    given = parser.parse_args()
    with scratch(given.scratch) as folder:
        if given.real:
            row = real.compared(folder, round(given.real * 1e9), round(given.megabytes * 1e6))
            print(json.dumps(row, indent=1))
            print("\n".join(real.table(row)), file=sys.stderr)
            return
        measurements = measured(folder, given)
    models = {
        (size, shared): model_of(measurements, size, shared) for size in ("tenth", "whole") for shared in (True, False)
    }
    rows = {
        f"{'shared' if shared else 'own'} folders, {count} machines": simulated(models, shared, count, given)
        for shared in (True, False)
        for count in given.machines
    }
    print(json.dumps({**measurements, "load": os.getloadavg()[0], "rows": rows}, indent=1))
    lines, held = table(rows, given)
    print("\n".join(lines), file=sys.stderr)
    sys.exit(not held)


def measured(folder: Path, given: argparse.Namespace) -> dict:
    """Rates, and what names take of the whole corpus and of a tenth."""
    size, shard = round(given.terabytes * 1e12), round(given.shard_megabytes * 1e6)
    small, large = (folder / name for name in ("small", "large"))
    for corpus, part in ((small, 0.2), (large, 1.0)):
        rates.make_corpus(corpus, round(given.megabytes * 1e6 * part), shard=round(given.megabytes * 1e6 / 8))
    measurements = ask("rates", str(max(64 << 20, size // 32_768)), str(OFTEN), str(small), str(large))
    document = Rates(measurements["corpora"]).document
    known = json.loads(given.names.read_text())["names"] if given.names else {}
    for name, its in (("tenth", size // 10), ("whole", size)):
        if name not in known:
            with scratch(folder) as place:
                roles = {role: ask("names", role, str(place), str(its), str(shard), str(document)) for role in ROLES}
            known[name] = {"size": its, "shard": shard, "roles": roles}
    return {"rates": measurements, "names": known}


def ask(module: str, *words: str) -> dict:
    print(f"{module} {' '.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"benchmarks.scale.{module}", *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def model_of(measurements: dict, size: str, shared: bool):
    """A model of a corpus on any machines."""
    known, of = measurements["names"][size], Rates(measurements["rates"]["corpora"])
    units = round(known["roles"]["rank"]["units"])
    corpus = Corpus(known["size"], round(known["size"] / of.document), [known["size"] / units] * units)
    return lambda on: Model(corpus, of, known["roles"], measurements["rates"]["unit"], on, shared)


def simulated(models: dict, shared: bool, count: int, given: argparse.Namespace) -> dict:
    """Both stages on some machines, the whole corpus beside a tenth of it."""
    on = Machines(count, given.cores, given.network / 8 * 1e9, given.files / 8 * 1e9)
    stages = {}
    for name in ("validate", "preprocess"):
        tenth, whole = (getattr(models[size, shared](on), name)() for size in ("tenth", "whole"))
        for small, large in zip(tenth, whole, strict=True):
            row = {"where": large.where, "hours": large.seconds / 3600, "memory": large.memory}
            row |= {"read": large.read, "written": large.written, "processors": large.processors}
            grows = superlinear(small.seconds, large.seconds, times=10) and large.seconds > 60
            stages[f"{name}: {large.name}"] = {**row, "tenth": small.seconds / 3600, "superlinear": grows}
    return {"machines": count, "cores": given.cores, "stages": stages}


def table(rows: dict, given: argparse.Namespace) -> tuple[list[str], bool]:
    """The rows for people, and whether all limits hold."""
    lines, held = [], True
    for title, row in rows.items():
        stages = row["stages"]
        lines += [
            "",
            f"{given.terabytes:g} TB in files of {given.shard_megabytes:g} MB, {title} of {given.cores} cores",
        ]
        for name, stage in stages.items():
            grows = "  superlinear" if stage["superlinear"] else ""
            lines.append(
                f"  {name:36}{stage['where']:15}{stage['hours']:8.2f} h{stage['memory'] / 1e9:9.2f} GB"
                f"{(stage['read'] + stage['written']) / 1e12:9.2f} TB moved{grows}"
            )
        hours = sum(stage["hours"] for stage in stages.values())
        peaks = {where: max(s["memory"] for s in stages.values() if s["where"] == where) for where in get_args(Where)}
        moved = sum(stage["read"] + stage["written"] for stage in stages.values()) / 1e12
        memory = ", ".join(f"{where} {peak / 1e9:.1f} GB" for where, peak in peaks.items())
        lines.append(f"  {'all':51}{hours:8.2f} h; most memory: {memory}; {moved:.0f} TB moved")
        broken = [f"{name} is superlinear" for name, stage in stages.items() if stage["superlinear"]]
        if (row["machines"], row["cores"]) == GOAL and hours > MOST_HOURS:
            broken.append(f"{hours:.1f} h")
        limits = {"machines": MOST_RANK, "first machine": MOST_RANK, "launcher": MOST_LAUNCHER}
        broken += [f"{where}: {peaks[where] / 1e9:.1f} GB" for where, most in limits.items() if peaks[where] > most]
        lines.append(f"  limits: {'; '.join(broken) or 'all hold'}")
        held = held and not broken
    return lines, held


if __name__ == "__main__":
    main()
