"""The local Prefect server: started on first use, reused, stopped by `headway down`.

It listens on loopback, asks for a password from its first start, and keeps everything under `.headway/prefect`; the user's own
Prefect profile is never touched. It keeps its port as long as nobody else takes it. An existing server is used instead when
`PREFECT_API_URL` is set. `prepare` must be called before Prefect is imported.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.services.library_settings import take_no_files
from deployments.services.starting import Say, choose_port, not_locked, require_same_port, wait_until_it_answers
from tasks.common import process
from tasks.common.errors import Missing, Refused
from tasks.config import database
from tasks.security.policy import load_or_none

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

ANSWER_SECONDS = 10.0
"""Patience of a probe. Nobody listening is told at once; a server that is busy may need some seconds for a small answer."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # Prefect's five tries last a minute; a run shall outlive a server that is away for some.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def prepare(home: Path, port: int | None = None) -> dict[str, Any]:
    """Set Prefect's environment, and start the local server unless one runs. Does not wait: see `wait`.

    Raises ValueError when a wanted port is taken, Missing when the database is locked or Prefect is not installed.
    """
    if importlib.util.find_spec("prefect") is None:
        raise Missing("Prefect is not installed", remedy="pip install -c constraints.txt -e '.[local]'")
    take_no_files()
    os.environ.update({key: os.environ.get(key, value) for key, value in QUIET.items()})
    named = named_server(home)
    if named:
        return {"url": named, "ours": False}
    folder = home / "prefect"
    server = _running(folder)
    if server:
        require_same_port(port, server["port"], "Prefect's server")
    else:
        if database.kept(home) is None:
            not_locked(folder / "prefect.db")
        known = process.read_json(folder / "server.json") or {}
        chosen = choose_port(port, known.get("port"))
        uvicorn = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--host", "127.0.0.1"]
        argv = [sys.executable, *uvicorn, "--port", str(chosen), "--log-level", "warning", "--timeout-keep-alive", "5"]
        spec = process.ProcessSpec(
            argv=argv, env=_server_environment(folder, chosen), log="server.log", restarts=20, steady=10.0, grace=5.0
        )
        handle = process.start(folder, spec)
        server = {"url": f"http://127.0.0.1:{chosen}", "port": chosen, "pid": handle["pid"], "since": time.time()}
        server["folder"] = str(folder)
        process.write_json(folder / "server.json", server)
    os.environ.update(_client_environment(folder, server["port"]))
    return {**server, "ours": True}


def client() -> SyncPrefectClient:
    """A client of the server of the environment.

    Prefect's own reads the certificates of all authorities each time that one is made, which takes 12 ms; where nothing is
    encrypted it does not have to.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    encrypted = (PREFECT_API_URL.value() or "https:").startswith("https:")
    settings = None if encrypted else {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    return get_client(httpx_settings=settings, sync_client=True)


def without_heartbeats() -> AbstractContextManager[object]:
    """Flows called within send no heartbeats: on our own server nothing waits for them, as the watch looks at the process itself.

    Prefect's thread for them sleeps a second at a time, and each run waits for its end.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    result: AbstractContextManager[object] = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    return result


def named_server(home: Path) -> str | None:
    """The address of a server of somebody else's that `PREFECT_API_URL` names; None when that is empty, or our own.

    Raises Refused for one that the home's policy does not list: the server says who started a run, and a worker does what it
    says, so whoever chose the server would choose who they are.
    """
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/").removesuffix("/api")
    known = process.read_json(home / "prefect" / "server.json") or {}
    if not url or url == known.get("url"):
        return None
    policy = load_or_none(home)
    if policy and url not in {one.rstrip("/").removesuffix("/api") for one in policy.prefect_servers}:
        raise Refused(
            f"PREFECT_API_URL names {url}, which the policy of {home} does not list: nothing is run on it",
            remedy="Unset it; or have whoever keeps the policy write the address under `prefect_servers` there.",
        )
    return url


def post(path: str, body: dict[str, Any]) -> Any:
    """What the server of the environment answers to a request of its API. Prefect is not imported, which takes a second.

    Raises OSError when there is no answer, or none of the kind.
    """
    key, login = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING", "")
    headers = {
        "Authorization": f"Bearer {key}" if key else f"Basic {base64.b64encode(login.encode()).decode()}",
        "Content-Type": "application/json",
    }
    address = f"{os.environ['PREFECT_API_URL'].rstrip('/')}{path}"
    request = urllib.request.Request(address, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def login_of(home: Path) -> str:
    """Where the login of the page is kept, to stand behind its address; nothing for a server of somebody else's."""
    return "" if named_server(home) else f"   (login: {home / 'prefect' / 'credentials'})"


def wait(server: dict[str, Any], say: Say = lambda text: None) -> None:
    """Return when the server answers with our password. `say` is told while a server of this machine is starting.

    Raises Missing for one that ended, or does not answer in time; for somebody else's that does not answer at once.
    """
    if server["ours"]:
        wait_until_it_answers("Prefect's server", server, lambda: _answers(server["url"]), say)
    elif not _answers(server["url"]):
        raise Missing(
            f"the Prefect server at {server['url']}, which PREFECT_API_URL names, does not answer",
            remedy="Start it, correct the address, or unset PREFECT_API_URL: then Headway uses a server of its own.",
        )


def require(home: Path, say: Say) -> None:
    """Wait for the server that this home uses: the local one, or the one that is named. Starts nothing.

    Raises Missing when the local one does not run, and what `wait` raises.
    """
    if named_server(home) is None and status(home) is None:
        raise Missing("the platform is not up", remedy="Start it: `headway up --detach`.")
    wait(prepare(home), say)


def status(home: Path) -> dict[str, Any] | None:
    """The local server when it runs: address, since when, pid."""
    return _running(home / "prefect")


def reachable(home: Path) -> bool:
    """Whether the server that this home uses answers: the local one when it runs, or the one that is named. Starts nothing."""
    if named_server(home) is None and status(home) is None:
        return False
    return _answers(prepare(home)["url"])


def down(home: Path) -> bool:
    """Stop the local server; whether one ran."""
    ran = _running(home / "prefect") is not None
    process.stop(home / "prefect")
    return ran


def password(home: Path) -> str:
    """`user:password` of the local server, made at first use, readable by its owner only."""
    return process.secret(home / "prefect" / "credentials", lambda: f"headway:{secrets.token_urlsafe(24)}")


def _running(folder: Path) -> dict[str, Any] | None:
    server: dict[str, Any] | None = process.read_json(folder / "server.json")
    return server if server and process.alive(process.read_json(folder / "handle.json")) else None


def _server_environment(folder: Path, port: int) -> dict[str, str]:
    """What the local server is started with."""
    return {
        **_client_environment(folder, port),
        **database.prefect_environment(folder.parent),
        # Its own, for the tables that a migration copies: the disk of the home has room, another may have none.
        "SQLITE_TMPDIR": str(folder),
        "PREFECT_SERVER_API_AUTH_STRING": password(folder.parent),
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        # Prefect has two pages. The address without a path leads to the one that links to runs lead to.
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Flow runs go 90 days after their end, with their logs and notes; by default only events are forgotten.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        # In memory, the default, a killed server forgets who holds a slot, and the slot stays occupied for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }


def _client_environment(folder: Path, port: int) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_UI_URL": f"http://127.0.0.1:{port}",
        "PREFECT_API_AUTH_STRING": password(folder.parent),
        **QUIET,
    }


def _answers(url: str) -> bool:
    login = base64.b64encode(os.environ.get("PREFECT_API_AUTH_STRING", "").encode()).decode()
    request = urllib.request.Request(f"{url}/api/admin/version", headers={"Authorization": f"Basic {login}"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
