"""The folder that holds all state of one Headway, and whether it is ours. Nothing but the standard library is imported here."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The folder that holds all state: `HEADWAY_HOME`, else `.headway` in the working directory.

    Raises ValueError for one that nobody named and that another user made: in a shared folder it would be obeyed.
    """
    named = os.environ.get("HEADWAY_HOME")
    path = Path(named or ".headway").absolute()
    if not named:
        _require_own(path)
    return path


def require_known() -> None:
    """Raise ValueError in a worker's folder for a run when nobody said by a whole path where the home is."""
    named = os.environ.get("HEADWAY_HOME")
    if Path(named or "").is_absolute() or home().is_dir():
        return
    how = f"is {named!r}, which is not a whole path" if named else "is not set"
    raise ValueError(
        f"HEADWAY_HOME {how}, and {Path.cwd()}, where the worker runs this, has no home: nobody knows where datasets and models "
        "are. Name the folder where the worker is started, HEADWAY_HOME=/FOLDER prefect worker start --pool headway, or for all "
        "workers where the deployments are made, HEADWAY_HOME=/FOLDER prefect deploy --all"
    )


def _require_own(home: Path) -> None:
    """Raise ValueError unless a home that is there belongs to this user or root, and its parts lie in it."""
    if not os.path.lexists(home):
        return
    remedy = f"if it is meant, name it: export HEADWAY_HOME={home}; else work in another folder"
    owners = {os.lstat(home).st_uid, home.stat().st_uid if home.exists() else 0} - {os.geteuid(), 0}
    if owners:
        raise ValueError(f"{home} belongs to another user (uid {min(owners)}): {remedy}")
    if not home.is_dir():
        return  # said by whoever uses it
    with os.scandir(home) as parts:
        for part in parts:
            if part.is_symlink() and not Path(part.path).resolve().is_relative_to(home.resolve()):
                raise ValueError(
                    f"{part.path} is a link to {Path(part.path).readlink()}, outside of the home: {remedy}"
                )


def stopped_mark(home: Path) -> Path:
    """A file that is there while somebody has stopped the platform of a home (`headway down`)."""
    return home / "platform" / "stopped.json"
