"""The lines that mount BeeOND, run by a real bash with executables that write down how they were called."""

import os
import subprocess

from tasks.compute.slurm.render import beeond_lines
from tasks.config.cluster import ScratchConfig

SCRATCH = ScratchConfig(path="/mnt/nvme disk/", size_gib=1, beeond=True)


def bash(tmp_path, *after, beeond=True):
    """Run the lines and some more; exit code and the calls in their order."""
    for name in ("beeond", "scontrol", "srun") if beeond else ("scontrol", "srun"):
        told = '[ -f "$3" ] && echo "with $(tr "\\n" " " < "$3")" >> calls; true' if name == "beeond" else "true"
        (tmp_path / name).write_text(
            f'#!/bin/bash\n[ {name} = scontrol ] && printf "n1\\nn2\\n"\necho "{name} $*" >> calls\n{told}\n'
        )
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "TMPDIR": str(tmp_path),
    }
    script = "\n".join(["set -eu", *beeond_lines(SCRATCH), *after])
    ran = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return ran, [call for call in calls if not call.startswith("scontrol")]


def test_it_is_mounted_on_all_machines_and_taken_away_after(tmp_path):
    ran, calls = bash(tmp_path, "echo training >> calls")
    assert ran.returncode == 0, ran.stderr
    nodes = calls[1].split()[3]
    assert calls == [
        "srun --ntasks-per-node=1 mkdir -p /mnt/nvme disk/beeond-data /mnt/nvme disk/beeond",
        f"beeond start -n {nodes} -d /mnt/nvme disk/beeond-data -c /mnt/nvme disk/beeond",
        "with n1 n2 ",
        "training",
        f"beeond stop -n {nodes} -L -d",
        "with n1 n2 ",
    ]


def test_it_is_taken_away_when_the_job_fails_and_the_code_stays(tmp_path):
    ran, calls = bash(tmp_path, "exit 9")
    assert ran.returncode == 9
    assert calls[-2].startswith("beeond stop")


def test_machines_without_it_are_a_clear_error(tmp_path):
    ran, calls = bash(tmp_path, "echo training >> calls", beeond=False)
    assert ran.returncode == 127
    assert "beeond is not installed" in ran.stderr
    assert "training" not in calls
