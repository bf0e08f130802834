"""The checkpoint of another run that training begins with: found and kept there, then taken over into the new job's own folder.

    python -m tasks.jobs.checkpoint.origins JOB/checkpoints                             the newest that verifies, as JSON
    python -m tasks.jobs.checkpoint.origins JOB/checkpoints NAME STEP ATTEMPT SHA256    keep that one for NAME until it is taken
    over

The new job's first checkpoint is the other one under the new identity: the same files, linked where that can be done, and read
whole. From there on all is as in any run: restored, chained to, retained. Of the other job's folder nothing is deleted or changed
but the mark that keeps the checkpoint. What may differ: tasks/config/continue_from.py. Standard library only, for a command line
runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import write_json
from tasks.config.continue_from import Origin, TakeOver, name_of, of_another_run
from tasks.jobs.checkpoint.files import (
    Manifest,
    commit,
    create_only,
    digest,
    manifests,
    place_of,
    quarantined,
    read_manifest,
    sync,
    verify,
    verify_file,
)
from tasks.jobs.checkpoint.retention import KEPT_FOR, pin

AGAIN = "Start it again with another --reason: --continue-from then takes the newest one that is there."


def newest_good(root: Path) -> dict[str, Any]:
    """The newest checkpoint of a job whose every byte verifies, as `{found, sha256, passed_over}`; `found` is None without one.

    What fails is passed over and not quarantined, for the folder is another run's.
    """
    passed_over = []
    for path in manifests(root):
        if reason := quarantined(path.parent):
            passed_over.append(reason)
            continue
        try:
            manifest = verify(path)
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            return {"found": asdict(manifest), "sha256": sha256, "passed_over": passed_over}
        except (IntegrityError, FileNotFoundError) as error:
            passed_over.append(str(error))
    return {"found": None, "sha256": "", "passed_over": passed_over}


def keep(root: Path, origin: Origin, *, attempt: int, name: str) -> None:
    """Mark a checkpoint that was looked at, so that its own job does not delete it before it is taken over.

    In a folder that only its owner may write to, there is no mark. Raises Missing, IntegrityError when it is gone by now.
    """
    folder = place_of(root, origin.step, attempt)
    with suppress(OSError):
        if folder.is_dir() and not create_only(mark := folder / f"{KEPT_FOR}{name}", {}):
            os.utime(mark)
    _chosen(folder / "manifest.json", origin)


def continued_from(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a job's settings say of the run that it goes on from: job, step, sha256, and the tokens until there; None: of none."""
    output = settings.get("continue_from")
    return {**output["origin"], "tokens": output["how"]["tokens"]} if output else None


def take_over(settings: Mapping[str, Any], root: Path, wanted: Mapping[str, Any], *, attempt: int) -> Manifest | None:
    """Make the other run's checkpoint the first one of this job; None when the job goes on from none.

    Raises Missing when it is not there any more, IntegrityError when it is another one than was chosen, or not whole, ValueError
    when more differs than was accepted.
    """
    if not (output := settings.get("continue_from")):
        return None
    origin, how = Origin.model_validate(output["origin"]), TakeOver.model_validate(output["how"])
    remote, local = place_of(Path(how.folder), origin.step, how.attempt), place_of(root, origin.step, attempt)
    manifest = _chosen(remote / "manifest.json", origin)
    where = remote
    differences = of_another_run(manifest.identity, wanted)
    if others := [each for each in differences if name_of(each.key) not in how.accepted]:
        raise ValueError(f"cannot continue from {where}: {'; '.join(map(str, others))}, and nobody accepted that")
    for entry in manifest.files:
        _link(remote / entry["path"], local / entry["path"])
        verify_file(local / entry["path"], entry)
    mine = replace(manifest, attempt=attempt, consumed_samples=how.consumed_samples, previous=None)
    commit(root, replace(mine, identity=dict(wanted), identity_digest=digest(wanted)))
    write_json(root / "LATEST", {"step": origin.step, "attempt": attempt})
    pin(local, attempt)
    with suppress(OSError):
        (remote / f"{KEPT_FOR}{how.kept_for}").unlink(missing_ok=True)
    print(
        f"continues from step {origin.step} of {origin.job}, at sample {how.consumed_samples} of the data", flush=True
    )
    return read_manifest(local / "manifest.json")


def _chosen(path: Path, origin: Origin) -> Manifest:
    if not path.is_file():
        raise Missing(
            f"the checkpoint of step {origin.step} of {origin.job} is not there any more: {path}", remedy=AGAIN
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != origin.sha256:
        raise IntegrityError(f"{path} is not the manifest that was chosen, {origin.sha256[:12]}", remedy=AGAIN)
    return read_manifest(path)


def _link(remote: Path, local: Path) -> None:
    """A second name for the same bytes, which no run ever writes to again; a copy on another file system."""
    local.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(remote, local)
    except OSError:
        shutil.copyfile(remote, local)
    sync(local)
    sync(local.parent)


def _main(root: str, name: str = "", step: str = "0", attempt: str = "0", sha256: str = "") -> None:
    if name:
        keep(
            Path(root),
            Origin(job=Path(root).parent.name, step=int(step), sha256=sha256),
            attempt=int(attempt),
            name=name,
        )
    else:
        print(json.dumps(newest_good(Path(root))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
