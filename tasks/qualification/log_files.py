"""Files of logs, read: which files of a folder are logs, what is in each, and which machines it is of.

A log that is missing, empty, or of nothing that is known is a value too, with the reason: it must not be forgotten.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from tasks.formats.aznhc import NhcRun, is_aznhc, read_aznhc
from tasks.formats.log_text import text_of
from tasks.formats.megatron_log import MegatronRun, read_megatron
from tasks.formats.nccl_run import NcclLog, NcclRun, read_log, read_nccl_json
from tasks.formats.nccl_tests import read_nccl_tests, words_during

# Which machines a log is of, where it does not say: by the names of its file and folder. One name of a machine for
# several.


_PARTS = re.compile(r"[_+,@=\s]+|-vs-|\.")
_MACHINE = re.compile(
    r"(?=.*\d)(?:(?:[a-z]*vm|[a-z]*node|host|gpu|compute|worker|hpc|ip|slurm|nd|aks|batch)[a-z]*-?[\w-]*\d|[a-z][a-z\d]*(?:-[a-z\d]+)*-\d+)",
    re.IGNORECASE,
)
"""Names that machines have in clusters: vm-07, mynode-042, ip-0A000004, hpc-1, aks-gpu-123-vmss000001."""
_NO_MACHINE = re.compile(
    r"(?:nd|nc|hb)\d+\w*|(?:job|run|test|try|round|slurm|part|pair|step)-?\d+|nodes?\d*|\d+[a-z]*", re.IGNORECASE
)


def machines_of(path: str, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Machines that a path names: those that are known from other logs, else what looks like one; none is no guess."""
    pure = PurePath(path)
    for text in (pure.name, pure.parent.name):
        results = [
            name
            for name in sorted(known, key=len, reverse=True)
            if (re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])|(?:^|_){re.escape(name)}(?=_|$)", text) is not None)
        ]
        if results:
            return tuple(sorted(results, key=text.lower().index))
    for text in (pure.name, pure.parent.name):
        results = [part for part in _PARTS.split(text) if _MACHINE.fullmatch(part) and not _NO_MACHINE.fullmatch(part)]
        if results:
            return tuple(dict.fromkeys(results))
    return ()


def one_name(names: Iterable[str]) -> dict[str, str]:
    """Each name's own: vm-1.internal.cloudapp.net is vm-1 where both are there."""
    known = set(names)
    return {name: name.split(".")[0] if name.split(".")[0] in known else name for name in known}


NO_LOGS = (
    ".md", ".py", ".sh", ".sbatch", ".slurm", ".yaml", ".yml", ".csv", ".png", ".svg", ".html", ".xml", ".conf", ".cfg", ".toml",
    ".pdf", ".zip", ".tar", ".sha256",
)  # fmt: skip
"""Files that lie beside logs; one that is named itself is read all the same."""
ERRORS = (".err", ".stderr")


@dataclass(frozen=True)
class Log:
    """One log: a run of nccl-tests, the AzNHC runs of a file, a training, NCCL's words alone, or nothing."""

    path: str
    tool: str = ""
    """Empty: nothing is known of it."""
    nodes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read of it."""
    written: datetime.datetime | None = None
    nccl: NcclRun | None = None
    words: NcclLog | None = None
    """NCCL's own, said during the run."""
    aznhc: tuple[NhcRun, ...] = ()
    training: MegatronRun | None = None


def read_logs(paths: Sequence[Path]) -> list[Log]:
    """All logs of files and folders. Machines that only a file's name tells are found with the names that the others say."""
    files = [file for path in paths for file in _files(path)]
    logs = [log for file in dict.fromkeys(files) for log in read_file(file)]
    known = {name for log in logs for name in log.nodes}
    return [log if log.nodes else replace(log, nodes=machines_of(log.path, known)) for log in logs]


def read_file(path: Path) -> list[Log]:
    """All that is in one file; a Log with a problem where that is nothing."""
    try:
        raw, written = path.read_bytes(), datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    except OSError as error:
        return [Log(str(path), problems=(f"it cannot be read: {error.strerror or error}",))]
    text = text_of(raw)
    if not text.text:
        return [Log(str(path), problems=text.problems, written=written)]
    results = [*_nccl(path, text.text), *_others(path, text.text)] or [_unknown(path, text.text)]
    return [replace(log, problems=(*log.problems, *text.problems), written=written) for log in results]


def _files(path: Path) -> list[Path]:
    """Logs of a folder and the folders in it; the path itself where it is no folder, also when it is not there."""
    if not path.is_dir():
        return [path]
    results = sorted(file for file in path.rglob("*") if file.is_file() and not _is_aside(file, path))
    return results or [path / "*"]


def _is_aside(file: Path, root: Path) -> bool:
    """Hidden, no log by its ending, or the empty error output beside a job's log."""
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    empty = (
        file.suffix in ERRORS
        and file.stat().st_size == 0
        and any(other != file and other.stem == file.stem for other in file.parent.iterdir())
    )
    return hidden or file.suffix.lower() in NO_LOGS or empty


def _nccl(path: Path, text: str) -> list[Log]:
    written = read_nccl_json(text, path.name) if text.lstrip().startswith("{") else None
    if written:
        return [Log(str(path), written.tool, written.hosts, nccl=written)]
    runs = read_nccl_tests(text, path.name)
    logs = []
    for run, part in zip(runs, words_during(text, runs), strict=True):
        words = read_log(part)
        hosts = run.hosts or tuple(dict.fromkeys(host for _, host in words.ranks))
        logs.append(Log(str(path), run.tool, hosts, nccl=run, words=words))
    return logs


def _others(path: Path, text: str) -> list[Log]:
    logs = []
    # The last run of each machine: AzNHC writes each after those before.
    if is_aznhc(text) and (
        runs := list({run.host or str(number): run for number, run in enumerate(read_aznhc(text))}.values())
    ):
        named = [run.host for run in runs if run.host] or list(machines_of(str(path)))
        logs.append(Log(str(path), "aznhc", tuple(dict.fromkeys(named)), aznhc=tuple(runs)))
    if training := read_megatron(text):
        hosts = training.hosts or tuple(host for host, _ in read_log(text).by_host)
        logs.append(Log(str(path), training.tool, hosts, training=training))
    return logs


def _unknown(path: Path, text: str) -> Log:
    words = read_log(text)
    if words.by_host:
        return Log(str(path), "nccl", tuple(host for host, _ in words.by_host), words=words)
    return Log(str(path), problems=("nothing in it is of nccl-tests, rccl-tests, AzNHC or Megatron",))
