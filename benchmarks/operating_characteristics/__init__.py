"""How often Headway's judgements are right, by simulations with known truth: what is stated, beside what was measured.

One module a judgement, each with a function `rows(quick: bool)`; `python -m benchmarks.operating_characteristics` prints them.
"""

from typing import NamedTuple


class Line(NamedTuple):
    """A row of the table of all judgements."""

    judgement: str
    stated: str
    measured: str
    truth: str
    seed: int
    trials: int
