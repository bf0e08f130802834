"""A machine against its own past: warnings that come back, and a rate that it once had."""

from __future__ import annotations

import datetime

from tasks.qualification.verdicts import NodeVerdict, Value


class Past(Value):
    """An earlier verdict on a machine."""

    time: datetime.datetime
    verdict: NodeVerdict
