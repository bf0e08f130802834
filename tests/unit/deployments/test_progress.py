"""What the terminal says of a stage that is at work."""

import io

import pytest
from rich.console import Console

from deployments.cli import progress
from deployments.cli.progress import Progress

pytestmark = pytest.mark.unit


def test_a_stage_of_several_parts_has_the_time_left_of_its_present_part(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress(Console(file=io.StringIO()))
    shown.began = shown._part = now
    now = 160.0
    shown.progress("evaluate", 75, 100, "windows", None)
    assert "75%  60 s  about 20 s left  windows" in str(shown._line(*shown._state))
    shown.progress("evaluate", 0, 100, "samples", None)
    now = 164.0
    shown.progress("evaluate", 20, 100, "samples", None)
    assert "20%  64 s  about 16 s left of this part  samples" in str(shown._line(*shown._state))
    shown.progress("evaluate", 40, 100, "samples", 9.0)  # the job knows better
    assert "about 9 s left of this part" in str(shown._line(*shown._state))
