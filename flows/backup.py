"""A backup on a schedule: key assets into a store of backups, and the drill that proves it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import flow, task

from flows.support.inputs import configured
from flows.support.prefect_run import named, setting, started_by
from tasks.common.errors import IntegrityError
from tasks.common.home import home
from tasks.config.flows import BackupConfig
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact, number, table
from tasks.registry.backup.backup import back_up
from tasks.registry.backup.restore import drill
from tasks.storage import open_named, open_store


@flow(  # type: ignore[untyped-decorator]
    name="backup",
    flow_run_name=lambda: named(setting("to")),
    validate_parameters=False,
)
def backup(config: BackupConfig) -> dict[str, Any]:
    """Copy key assets to a store, incrementally; `headway restore` rebuilds an empty home from it.

    Raises IntegrityError when something is damaged here and in no backup, after the backup of all the rest.

    Args:
        config: Where to, how many backups stay, and whether the new one is proved by restoring it.
    """
    config = configured(BackupConfig, config)
    with started_by("publish", f"backup to {config.to}"):
        made = copy(config.to, config.keep)
        proved = prove(config.to) if config.drill else None
        damaged = made["damaged"]
        if damaged:
            raise IntegrityError(
                f"backed up, but not what is damaged here and in no backup from before: {', '.join(damaged[:5])}",
                problems=[{"path": ref, "problem": "sha256"} for ref in damaged],
                remedy="`headway verify` names the files of each; make it again.",
            )
        return {"backup": made, "drill": proved}


@task(name="copy", persist_result=False)  # type: ignore[untyped-decorator]
def copy(to: str, keep: int) -> dict[str, Any]:
    """Make a backup; leaves a note of what it holds."""
    made = back_up(home(), open_store(home()), open_named(home(), to), keep=keep)
    result = {
        "at": made.contents.at,
        "artifacts": len(made.contents.artifacts),
        "sent": len(made.sent),
        "sent_bytes": made.sent_bytes,
        "documents": len(made.contents.documents),
        "removed": len(made.pruned),
    }
    _leave("backup", result, f"backup to {to}")
    return {**result, "damaged": list(made.contents.damaged), "kept_out": list(made.kept_out)}


@task(name="drill", persist_result=False)  # type: ignore[untyped-decorator]
def prove(to: str) -> dict[str, Any]:
    """Restore the newest backup into a scratch place and compare it; leaves a note of how long that took."""
    result = asdict(drill(home(), open_named(home(), to)))
    _leave("drill", result, f"drill of the backup in {to}")
    return result


def _leave(key: str, result: dict[str, Any], words: str) -> None:
    rows = [[name.replace("_", " "), number(value)] for name, value in result.items()]
    hand_in(new_artifact("markdown", key, f"# {words}\n\n{table(['what', 'value'], rows)}", words))
