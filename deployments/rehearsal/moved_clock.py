"""A clock that jumps, as far as `time.time` goes: `clock-moved` plants this file as `sitecustomize.py`.

How many seconds it is off is in the file `offset` beside it. `time.monotonic` keeps running, as the kernel's clock does.
"""

import time
from pathlib import Path

OFFSET = Path(__file__).with_name("offset")
right, right_ns = time.time, time.time_ns


def off() -> int:
    return int(OFFSET.read_text()) if OFFSET.exists() else 0


time.time = lambda: right() + off()
time.time_ns = lambda: right_ns() + off() * 10**9
