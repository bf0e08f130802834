"""The secret that an endpoint's gateway and its servers share: other users of this machine reach the servers' private ports.

`gateway.secret` in the endpoint's folder, which only its owner may read; made at the first deploy. Whoever deploys names the file
to both. It is for the private ports only: what callers show is tasks/serving/keys.py. Standard library only, as routes.py.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from tasks.common.process import write_text


def make_secret(endpoint: Path) -> Path:
    """The file of an endpoint's secret, made when it is not there."""
    path = endpoint / "gateway.secret"
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32))
    return path


def read_secret(path: str | Path | None) -> str:
    """The secret; empty where no file is named, as in homes of a release before it. Raises ValueError for one that is gone."""
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; stop the endpoint, and deploy it again") from error
    if not text:
        raise ValueError(f"{path} is empty: remove it, stop the endpoint, and deploy it again")
    return text
