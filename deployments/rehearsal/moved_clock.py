"""The clock of a machine that jumps, as Python reads it (`time.time`): `clock-moved` plants this file as `sitecustomize.py`.

The seconds that it is off are in the file `offset` beside it. Clocks for waiting (`time.monotonic`) go on, as the kernel's do.
"""

import time
from pathlib import Path

OFFSET = Path(__file__).with_name("offset")
right, right_ns = time.time, time.time_ns


def off() -> int:
    return int(OFFSET.read_text()) if OFFSET.exists() else 0


time.time = lambda: right() + off()
time.time_ns = lambda: right_ns() + off() * 10**9
