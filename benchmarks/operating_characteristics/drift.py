"""How often unchanged documents are called drift, and how often a planted shift is found: the product's own comparison of windows
of the standard library's functions, none of them twice (benchmarks/drift_power.py)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.drift_power import SHIFTS, planted, pool, unchanged
from benchmarks.operating_characteristics import Line

SEED = 20
SIZES = (300, 300)


def rows(quick: bool) -> Iterator[Line]:
    """Unchanged windows first, then what is planted in windows of 1,000 documents."""
    drawn = pool(SEED, most=2000 if quick else 12_000)
    windows, trials, splits = (10, 1, 100) if quick else (600, 20, 400)
    found = sum(
        unchanged(drawn, SEED * 10_000 + n, sizes=SIZES, splits=splits)["verdict"] == "drift" for n in range(windows)
    )
    truth = f"independent documents, {SIZES[0]} against {SIZES[1]}"
    yield Line("drift", "drift in 5 % (nominal)", f"{found} of {windows}: {found / windows:.1%}", truth, SEED, windows)
    for shift in SHIFTS:
        found = sum(
            planted(drawn, shift, SEED * 10_000 + n, splits=splits)["verdict"] == "drift" for n in range(trials)
        )
        yield Line("drift", "found in >= 95 %", f"{found} of {trials}: {found / trials:.1%}", shift, SEED, trials)
