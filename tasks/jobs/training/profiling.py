"""A profile of some steps by torch's profiler: `profile/` in the job's folder, of rank 0.

`steps-A-B.json.gz` is a trace for https://ui.perfetto.dev or chrome://tracing, `steps-A-B.txt` the operations that took longest.
Steps that are profiled are slower. See docs/training.md.
"""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from tasks.config.training import ExecutionConfig

ROWS = 40


class Profile:
    """State: the profiler, while it records."""

    def __init__(self, folder: Path, execution: ExecutionConfig, *, rank: int, cuda: bool) -> None:
        self._folder, self._cuda = folder, cuda
        self._first = None if rank else execution.profile_from
        self._last = (execution.profile_from or 0) + execution.profile_steps - 1
        self._at_work: profile | None = None
        self._began = 0

    def before(self, step: int) -> None:
        """A step begins; a run that is resumed within the range records the rest of it."""
        if self._first and self._first <= step <= self._last and not self._at_work:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._at_work, self._began = profile(activities=activities, profile_memory=True), step
            self._at_work.start()

    def after(self, step: int, *, over: bool) -> None:
        """A step is done; `over`: none follows."""
        if self._at_work and (step >= self._last or over):
            self._at_work.stop()
            name = f"steps-{self._began}-{step}"
            self._folder.mkdir(exist_ok=True)
            self._at_work.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            order = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
            table = self._at_work.key_averages().table(sort_by=order, row_limit=ROWS)
            (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
            self._at_work = None
