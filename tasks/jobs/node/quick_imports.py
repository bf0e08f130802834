"""Importing without collecting garbage: a fifth of a rank's time to its start, and every restart waits for it.

torch and transformers are three thousand modules whose objects all stay, and Python's collector looks through them again and
again while they come: 0.7 to 1.1 s of 4.9 s CPU a rank (Python 3.11, torch 2.13, transformers 5). Import this module before
anything else, and call `done` after the last import. What a restart takes: benchmarks/recovery.py.
"""

from __future__ import annotations

import gc

_collected = gc.isenabled()
gc.disable()


def done() -> None:
    """Collect again, where it was so before; what is there by now is never looked at again, so later pauses are shorter, too."""
    gc.freeze()
    if _collected:
        gc.enable()
