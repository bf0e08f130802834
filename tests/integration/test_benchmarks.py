"""`make bench`: one benchmark that fails does not stop the others, and nothing writes into a folder that goes."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from waiting import limit

from benchmarks.__main__ import FULL, QUICK, measure_all

WRITER = """
import os, sys, time
if os.fork() == 0:  # whose parent ends at once
    os.setsid()
    number = 0
    while True:
        number += 1
        os.makedirs(f"{sys.argv[1]}/{number % 100}", exist_ok=True)
        open(f"{sys.argv[1]}/{number % 100}/{number}", "w").write(str(os.getpid()))
"""
MEASURING = """
import subprocess, sys, time
from benchmarks.scratch import scratch
for _ in range(3):
    with scratch() as folder:
        print(folder)
        subprocess.run([sys.executable, "-c", sys.argv[1], str(folder)], stdout=subprocess.DEVNULL, check=True)
        while not list(folder.glob("*/*")):
            time.sleep(0.01)
"""
ROOT = Path(__file__).parents[2]


def test_what_a_measurement_left_working_is_ended_before_its_folder_goes():
    told = subprocess.run(
        [sys.executable, "-c", MEASURING, WRITER], cwd=ROOT, capture_output=True, text=True, timeout=limit(60)
    )
    assert (told.returncode, told.stderr) == (0, "")
    folders = told.stdout.split()
    assert len(folders) == 3 and not any(Path(folder).exists() for folder in folders)
    assert not [each for each in psutil.process_iter(["cmdline"]) if set(folders) & set(each.info["cmdline"] or ())]


def test_one_that_fails_does_not_stop_the_others_and_is_told(capfd):
    told = {
        "first": [sys.executable, "-c", "print('1')"],
        "wrong": [sys.executable, "-c", "raise SystemExit(7)"],
        "last": [sys.executable, "-c", "print('2')"],
    }
    assert measure_all(told) == 1
    out, err = capfd.readouterr()
    assert out.split() == ["1", "2"] and "failed with exit code 7" in err and err.count("  done") == 2
    assert measure_all({"first": told["first"]}) == 0


@pytest.mark.unit
def test_each_is_there_quickly_and_fully():
    assert list(QUICK) == list(FULL)
    assert all(find_spec(f"benchmarks.{name}") for name in QUICK)
