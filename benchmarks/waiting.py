"""What a flow run's process holds while it waits for its training: memory, where `validate` judged in that process, and as it is.

`python -m benchmarks.waiting`. Two times `headway retrain --to train` of the shipped configuration `tiny`, which runs each stage
up to the training, in two homes. In the first one Great Expectations judges in the process of the flow, as in earlier releases;
in the second one in a process of its own (tasks/data/judging.py). Told is the proportional set size of the flow's process, MiB,
at the end of each stage, and of a training that runs. Run by `make bench`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.scratch import scratch

BEFORE = """
from tasks.data import judging
judging.judge_apart = lambda *values, folder, **named: judging.judge(*values, **named)
"""
RUN = """
import sys
sys.argv = ["headway", "retrain", "-c", "tiny", "--dataset", "corpus", "--to", "train"]
from deployments.cli.main import run
run()
"""
LOOK_SECONDS = 0.1


def main() -> None:
    with scratch() as folder:
        rows = {name: measure(folder / name, code) for name, code in (("before", BEFORE), ("now", ""))}
    print(json.dumps(rows, indent=1))
    for stage in rows["now"]:
        print(f"{stage:<12}{rows['before'][stage]:8.0f} MiB{rows['now'][stage]:8.0f} MiB", file=sys.stderr)


def measure(home: Path, code: str) -> dict[str, float]:
    """MiB by stage: the last look that was taken while it was at work."""
    environment = {**os.environ, "HEADWAY_HOME": str(home)}
    command = str(Path(sys.executable).parent / "headway")
    publish = [command, "dataset", "publish", "corpus", str(Path(__file__).parents[1] / "tasks"), "--include", "*.py"]
    subprocess.run(publish, env=environment, check=True, capture_output=True)
    process = subprocess.Popen([sys.executable, "-c", code + RUN], env=environment, stdout=subprocess.DEVNULL)
    memory: dict[str, float] = {}
    while process.poll() is None:
        if stage := at_work(home):
            memory[stage] = held(process.pid) or memory.get(stage, 0.0)
        time.sleep(LOOK_SECONDS)
    assert process.returncode == 0 and "train" in memory, f"retrain ended with code {process.returncode}"
    subprocess.run([command, "down", "--yes"], env=environment, check=True, capture_output=True)
    return memory


def at_work(home: Path) -> str:
    """The stage that is at work, by the log of the run."""
    for path in (home / "runs").glob("*/events.jsonl"):
        lines = [
            line
            for line in path.read_text().splitlines()
            if line.startswith(('{"event": "started"', '{"event": "ended"'))
        ]
        event = json.loads(lines[-1]) if lines else {}
        return event["stage"] if event.get("event") == "started" else ""
    return ""


def held(pid: int) -> float:
    """Proportional set size, MiB; 0 of a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


if __name__ == "__main__":
    main()
