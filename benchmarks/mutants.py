"""Plants ten faults in the product, one at a time, and tells which test notices each: what the suite is worth.

    python -m benchmarks.mutants [NAME ...] [--list] [-k] [-- PYTEST ARGUMENTS]

Each fault goes into a copy of the tree (what git tracks, and what is new), and the tests run there until the first one fails: the
unit tests, the integration tests of the fault's package, then all of `make test`. That test must fail with the fault once more,
alone, and pass without it: else the fault is UNSURE. One that no test notices SURVIVED. With either, the exit code is 1.

The faults were chosen by reading the product, without a look at the tests, one a subsystem. tests/unit/test_mutants.py says when
the code has moved away from under one. A test that starts a process with another PYTHONPATH, or none, runs the sound tree there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
UNIT = ["-m", "unit", "-n", "2"]
OTHERS = ["-m", "not long and not soak", "-n", "4", "--dist", "loadfile"]
LEFT_OUT = "--ignore=tests/unit/test_mutants.py"
"""It compares the tree with this file, so it would notice every fault by its text."""
PASSED, NO_TESTS = 0, 5
"""Exit codes of pytest."""
LOOK_SECONDS, LOOKS_A_LINE = 0.5, 120
"""Between two looks at pytest; and looks for which there is one line of progress, where the output is no terminal."""
WHERE = "import deployments, flows, tasks; print(*deployments.__path__, *flows.__path__, *tasks.__path__)"
COMMIT = "-c user.name=mutants -c user.email=mutants@localhost -c commit.gpgsign=false commit -qnm copy"


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault: the text `before`, which occurs once in the file, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    why: str

    def around(self, tree: Path) -> list[str]:
        """The file's text before and behind the place. Raises ValueError when `before` is not in it exactly once."""
        path = tree / self.file
        parts = (path.read_text(encoding="utf-8") if path.is_file() else "").split(self.before)
        if len(parts) != 2:
            raise ValueError(
                f"the mutant {self.name} does not fit {self.file} any more: the text that it replaces must occur once there, and "
                f"occurs {len(parts) - 1} times. The code has moved: move the mutant along, in benchmarks/mutants.py."
            )
        return parts


# fmt: off
MUTANTS = (
    Mutant("finished-job-again", "tasks/compute/supervisor.py",
        'if state.over and not (self.folder / "result.json").exists():',
        "if state.over:",
        "A job that ended with a result while nobody supervised it is closed as failed and submitted again, not adopted."),
    Mutant("last-good-checkpoint-deleted", "tasks/jobs/checkpoint/retention.py",
        "if old and any(_lies_there(path) for path in kept):",
        "if old and kept:",
        "Older checkpoints go although the newest are damaged: the last one to go on from is among them."),
    Mutant("planted-file-unseen", "tasks/storage/manifest.py",
        'problems = [Problem(path=path, problem="extra") for path in sorted(result.keys() - expected.keys())]',
        "problems: list[Problem] = []",
        "A file that somebody put into a published artifact, or into the folder a model serves from, is no problem."),
    Mutant("gate-open-on-too-little", "tasks/evaluation/comparison.py",
        "yield _too_few(rule, slice, count, fewest, passed=False)",
        "yield _too_few(rule, slice, count, fewest, passed=True)",
        "A rule whose metric rests on too few documents or samples passes, and its limits are never looked at."),
    Mutant("promotion-overrun", "tasks/registry/refs.py",
        'document = place_of(store, name) if start == "now" else start',
        "document = place_of(store, name)",
        "A ref moves from where it stands now, not from where it was decided on: who promoted meanwhile is overwritten."),
    Mutant("near-copies-across-the-border", "tasks/data/corpus/parts.py",
        'duplicates.write_runs(folder, rows["high"], rows["low"], values, rows["shingled"], work.threshold or 0.0)',
        'learnt = rows["shingled"] & ~rows["heldout"]\n'
        '        duplicates.write_runs(folder, rows["high"], rows["low"], values, learnt, work.threshold or 0.0)',
        "Near copies are looked for in what is learnt only: a held-out document that nearly repeats one of it stays."),
    Mutant("refused-event-forgotten", "deployments/bridge/intake.py",
        "_forget(db, [row.number for row, value in looked if isinstance(value, NotAllowed)])",
        "_forget(db, [row.number for row, value in looked if not isinstance(value, Event)])",
        "An event about a blob is dropped when storage refuses to answer or is away, not kept until it answers."),
    Mutant("failures-of-the-new-model-hidden", "tasks/jobs/routing/proxy.py",
        "self._note(colour, began, failed=True, counted=counted)",
        "self._note(colour, began, failed=not replayed, counted=counted)",
        "A request that the new model failed and the old one then answered is no failure: it may fail all of them."),
    Mutant("budget-of-one-machine", "tasks/planning/spending.py",
        "return (spent.hour or 0.0) * on.nodes",
        "return spent.hour or 0.0",
        "Training stops at its budget by what one machine costs an hour: ten of them spend ten times the budget."),
    Mutant("account-taken-for-a-person", "tasks/security/policy.py",
        'if not policy.asks(right) or (now.identity != "account" and policy.may(now.name, right)):',
        "if not policy.asks(right) or policy.may(now.name, right):",
        "A process whose account is called as a person in the policy has that person's rights, and shows no token."),
)
# fmt: on


def stages(mutant: Mutant) -> dict[str, list[str]]:
    """The arguments of pytest for each stage: first what most likely notices the fault, at the end all of `make test`."""
    near = Path("tests/integration") / Path(mutant.file).parent
    while not (ROOT / near).is_dir():
        near = near.parent
    return {"unit tests": UNIT, f"tests of {near}": [*OTHERS, str(near)], "all tests": OTHERS}


def copy_tree(tree: Path, mutant: Mutant | None = None) -> Path:
    """Copy the repository without what git ignores, with a fault; as a repository, for stages note the commit of their code."""
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():  # git lists what is deleted and not committed, too
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    if mutant:
        (tree / mutant.file).write_text(mutant.after.join(mutant.around(tree)), encoding="utf-8")
    for words in ("init -q", "add -A", COMMIT):
        subprocess.run(["git", *words.split()], cwd=tree, check=True)
    found = subprocess.check_output([sys.executable, "-c", WHERE], cwd="/", env=environment(tree), text=True).split()
    if {Path(path).parent for path in found} != {tree}:
        raise ValueError(f"the tests would not run on the copy {tree}: Python imports {', '.join(found)}")
    return tree


def environment(tree: Path) -> dict[str, str]:
    """The packages come from the tree, in child processes too: PYTHONPATH goes before the editable install of .venv."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def run_tests(tree: Path, arguments: Sequence[str], *, what: str) -> tuple[int, str]:
    """Run pytest in a tree up to the first failure: its exit code, and the id of the test. Nothing that it started is left."""
    failed = tree / ".pytest_cache/v/cache/lastfailed"
    failed.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "pytest", "-x", "-q", LEFT_OUT, *arguments]
    log, began, looks = tree.with_suffix(".log"), time.monotonic(), 0
    say(f"{what} ...", passing=True)
    with open(log, "wb") as out:
        pytest = subprocess.Popen(argv, cwd=tree, env=environment(tree), stdout=out, stderr=out, start_new_session=True)
        try:
            while pytest.poll() is None:
                time.sleep(LOOK_SECONDS)
                looks += 1
                if sys.stdout.isatty() or looks % LOOKS_A_LINE == 0:
                    say(f"{what}: {how_far(log.read_bytes(), time.monotonic() - began)}", passing=True)
        finally:
            end_all(tree)
            pytest.wait()
    tests = json.loads(failed.read_text()) if failed.exists() else {}
    return pytest.returncode, next(iter(tests), "")


def how_far(log: bytes, seconds: float) -> str:
    """What pytest's output tells of the time that the tests may still take, if none fails."""
    percent = int((re.findall(rb"\[ *(\d+)%\]", log) or [b"0"])[-1])
    left = f", {percent} %, about {seconds * (100 - percent) / percent:.0f} s more" if percent else ""
    return f"{seconds:.0f} s{left}"


def end_all(tree: Path) -> None:
    """Kill what runs from a tree, servers of tests that were broken off too, until nothing comes after."""
    found = set[psutil.Process]()
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        program = words[:1] == [sys.executable] and any(word.startswith(f"{tree}/") for word in words)
        if program or str(tree) in variables.get("PYTHONPATH", "").split(os.pathsep):
            with suppress(psutil.NoSuchProcess):
                found |= {process, *process.children(recursive=True)}
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=1.0)
    if found:
        end_all(tree)


def say(line: str, *, passing: bool = False) -> None:
    """Print a line; on a terminal, the next one is written over one that is `passing`."""
    terminal = sys.stdout.isatty()
    print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal and passing else "\n", flush=True)


def judge(mutant: Mutant, folder: Path, arguments: Sequence[str], *, where: str) -> tuple[str, str]:
    """The verdict on a mutant (killed, SURVIVED, UNSURE), and by which test, or why."""
    say(f"{where}: the tree is copied ...", passing=True)
    tree, ran = copy_tree(folder / mutant.name, mutant), False
    for stage, options in stages(mutant).items():
        code, test = run_tests(tree, [*options, *arguments], what=f"{where}, {stage}")
        if test:
            return confirmed(test, tree, folder / "unchanged", where=where)
        if code not in (PASSED, NO_TESTS):
            said = " ".join(tree.with_suffix(".log").read_text(errors="replace").split())
            return "UNSURE", f"pytest ended with {code}, and no test failed: {said[-300:]}"
        ran = ran or code == PASSED
    return ("SURVIVED", "") if ran else ("UNSURE", "no test ran")


def confirmed(test: str, tree: Path, unchanged: Path, *, where: str) -> tuple[str, str]:
    """The verdict when a test failed: that counts when it does so again, and only with the fault."""
    code, again = run_tests(tree, [test], what=f"{where}, {test} once more")
    if again != test:
        return "UNSURE", f"{test} failed, but when it ran alone pytest ended with {code}"
    sound = unchanged if unchanged.exists() else copy_tree(unchanged)
    code, _ = run_tests(sound, [test], what=f"{where}, {test} without the fault")
    if code != PASSED:
        return "UNSURE", f"{test} failed, but without the fault pytest ended with {code}"
    return "killed", f"by {test}"


def run(mutants: Sequence[Mutant], folder: Path, arguments: Sequence[str], *, keep: bool) -> int:
    """Judge mutants one after the other; 1 when one is not killed."""
    others, start = list[str](), time.monotonic()
    for number, mutant in enumerate(mutants):
        began = time.monotonic()
        left = f" (about {(began - start) / number * (len(mutants) - number) / 60:.0f} min for all)" if number else ""
        verdict, how = judge(mutant, folder, arguments, where=f"{number + 1} of {len(mutants)}{left} {mutant.name}")
        said = " ".join(filter(None, (verdict, how, f"after {time.monotonic() - began:.0f} s")))
        say(f"{mutant.name:34}{said}")
        others += [f"{verdict}: {mutant.name}"] if verdict != "killed" else []
        if not keep:
            shutil.rmtree(folder / mutant.name, ignore_errors=True)
    print(f"{len(mutants) - len(others)} of {len(mutants)} killed", *others, sep="; ")
    return 1 if others else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="After --: pytest's arguments."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; without one, all")
    parser.add_argument("--list", action="store_true", help="print the mutants and their places, and run nothing")
    parser.add_argument("-k", "--keep", action="store_true", help="keep the copies, and print where they are")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    told = parser.parse_args(words[:end])
    if unknown := sorted(set(told.names) - {mutant.name for mutant in MUTANTS}):
        parser.error(f"there is no mutant {', '.join(unknown)}: --list prints the names")
    chosen = [mutant for mutant in MUTANTS if not told.names or mutant.name in told.names]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
    try:
        lines = {one.name: one.around(ROOT)[0].count("\n") + 1 for one in MUTANTS}  # all fit, or none is judged
        if not told.list:
            return run(chosen, folder, words[end + 1 :], keep=told.keep)
        print(*(f"{one.name}  {one.file}:{lines[one.name]}\n    {one.why}" for one in chosen), sep="\n")
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: what ran is ended")
        return 130
    finally:
        if told.keep:
            print(f"the copies are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
