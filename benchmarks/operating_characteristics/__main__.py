"""Print the operating characteristics of Headway's judgements as a table: what is stated, what was measured, under which truth.

python -m benchmarks.operating_characteristics [--quick] [NAME ...]
"""

import argparse

from benchmarks.operating_characteristics import Line, canary, drift, gate, loss, nodes, plan, watch

JUDGEMENTS = {
    "canary": canary.rows,
    "gate": gate.rows,
    "nodes": nodes.rows,
    "plan": plan.rows,
    "watch": watch.rows,
    "drift": drift.rows,
    "loss": loss.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(JUDGEMENTS)}; all without one")
    parser.add_argument("--quick", action="store_true", help="few trials, in seconds")
    given = parser.parse_args()
    if unknown := set(given.names) - set(JUDGEMENTS):
        parser.error(f"no such judgement: {', '.join(sorted(unknown))}; there are {', '.join(JUDGEMENTS)}")
    for line in (Line._fields, ["---"] * len(Line._fields)):
        print("|", " | ".join(line), "|", flush=True)
    for name in given.names or JUDGEMENTS:
        for row in JUDGEMENTS[name](given.quick):
            print("|", " | ".join(str(cell) for cell in row), "|", flush=True)


if __name__ == "__main__":
    main()
