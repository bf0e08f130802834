"""What `headway doctor` finds of the stores: the one that the home works in, and each in Azure that stores.yaml names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deployments.cli.doctor import Finding


def store_findings(home: Path) -> Iterator[Finding]:
    """Findings of all stores. A store in Azure is written to, because only a write tells whether it keeps versions."""
    from tasks.common.errors import HeadwayError
    from tasks.storage.settings import load_stores

    try:
        stores = load_stores(home)
    except (HeadwayError, ValueError) as error:
        yield Finding("stores", False, str(error), getattr(error, "remedy", "") or "Correct the file that is named.")
        return
    healthy = True
    for name, config in stores.stores.items():
        if config.uri.startswith("az://"):
            from tasks.storage.blob.health import examine

            health = examine(config)
            healthy = healthy and (health.ok or name != stores.use)
            yield Finding(f"store {name}", health.ok, health.said, health.remedy)
    if healthy:  # else it would fail once more, after as long a wait
        yield _artifacts(home)


def _artifacts(home: Path) -> Finding:
    from tasks.common.errors import HeadwayError
    from tasks.storage import open_store

    try:
        count = sum(1 for _ in open_store(home).manifests())
    except (HeadwayError, ValueError, OSError) as error:
        return Finding("store", False, str(error), getattr(error, "remedy", "") or "Restore the file that is named.")
    return Finding("store", True, f"{count} artifact(s)")
