"""All measurements of `make bench`, one after the other, each a process of its own; one that fails does not stop the others.

    python -m benchmarks [--full] [NAME ...]

Quick, the default, shows that each runs, with figures that vary; --full takes its time. With names only those run.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

QUICK = {
    "orchestration": "--repeats 2",
    "validation": "--megabytes 50",
    "preprocessing": "",
    "storage": "--megabytes 30 --repeats 1 --files 300 --gigabytes 0.1",
    "lineage": "100",
    "drift": "--megabytes 10",
    "duplicates": "--documents 30000",
    "scale": "--terabytes 0.02 --megabytes 20",
    "events": "--events 100 --times 2",
    "growth": "--runs 1000 --jobs 300 --times 3",
    "waiting": "",
    "polling": "--jobs 100 --seconds 10",
    "ranges": "--gigabytes 1 --epoch 16 --lengths 32768",
    "loader": "--tokens 5000000 --steps 20 --rounds 2",
    "checkpoint": "--gigabytes 0.1 --rounds 2",
    "recovery": "--rounds 1",
    "qualification": "",
    "training": "--rounds 4 --scaling 1",
    "serving": "--rounds 1 --clients 1 4",
    "overload": "5",
    "rollout": "--requests 200 --times 1",
    "simulation": "--runs 4",
    "planning": "",
    "planning_memory": "",
    "planning_figure": "",
}
"""What `make bench` runs, in its order."""
FULL = dict.fromkeys(QUICK, "") | {"storage": "--megabytes 300 --files 5000 --gigabytes 1", "lineage": "1000"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUICK)}")
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.names) - set(QUICK):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(QUICK)}")
    settings = FULL if given.full else QUICK
    commands = {
        name: [sys.executable, "-m", f"benchmarks.{name}", *settings[name].split()] for name in given.names or QUICK
    }
    return measure_all(commands)


def measure_all(commands: Mapping[str, Sequence[str]]) -> int:
    """Run each command to its end, then tell how each ended; 1 when one of them failed."""
    codes, seconds = {}, {}
    for name, command in commands.items():
        print(f"\n== {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        codes[name] = subprocess.run(command).returncode
        seconds[name] = time.monotonic() - began
    print(file=sys.stderr)
    for name, code in codes.items():
        said = f"failed with exit code {code}" if code else "done"
        print(f"{name:<18}{seconds[name]:8.1f} s  {said}", file=sys.stderr)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
