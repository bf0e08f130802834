"""How much of what was measured is noise, for rules that have no number in the hardware's file.

GPU machines are lent whole and their figures repeat within a few percent; ranks on CPUs share cores, caches and the kernel's TCP
with other work, so that only gross faults count there, and never as failed by a curve alone.
"""

from __future__ import annotations

from typing import NamedTuple

from tasks.hardware.sku import Sku


class Tolerances(NamedTuple):
    """Shares are of what the neighbours, the peers or the machine's own past show."""

    curve_bytes: int = 1 << 20
    """Smaller messages measure latency; their bandwidth jumps where the library changes its algorithm."""
    hole_warn: float = 0.6
    """Of the best smaller and larger message, the lower one. Sound curves of public logs stay over 0.85 of it."""
    hole_fail: float = 0.35
    apart: float = 0.75
    """Slower of the in-place and out-of-place rows of one size, of the faster one."""
    apart_rows: int = 1
    """Rows that must disagree before anything is said."""
    step_back: float = 0.8
    """Of the size before."""
    steps_back: int = 2
    """So many steps back make a curve that does not rise."""
    curve_fails: bool = True
    """Whether a curve alone can fail a machine."""
    peers_warn: float | None = 0.05
    """Short of the peers by more than this, and far outside their spread, is degraded. None: not judged."""
    own_warn: float = 0.9
    """Of the machine's own earlier median."""
    pairs: float = 1.0
    """Of benchmark.min_of_peers: the share of sound pairs below which a pair is slow."""
    pairs_gap: float = 0.85
    """A pair below this share of the next faster one begins another group of pairs."""
    lone_pair: float = 0.6
    """A single fast pair is the measure of the others where they are below this share of it."""
    link: float = 1.0
    """A single slow pair is believed below this share of the others, too."""
    most: float = 0.5
    """More than this share of a machine's pairs must be bad before it is blamed."""
    peers_by_measured: bool = True
    """Whether plain measurements are compared; else only those that were freed of what other work took (Probe.peers)."""


GPU = Tolerances()
CPU = Tolerances(
    hole_warn=0.2,
    hole_fail=0.0,
    apart=0.2,
    apart_rows=2,
    step_back=0.3,
    steps_back=3,
    curve_fails=False,
    peers_warn=None,
    own_warn=0.2,
    pairs=0.5,
    pairs_gap=0.5,
    lone_pair=0.2,
    link=0.15,
    most=0.7,
    peers_by_measured=False,
)


def tolerances(sku: Sku) -> Tolerances:
    """Those of a kind of machine."""
    return CPU if sku.vendor == "cpu" else GPU
