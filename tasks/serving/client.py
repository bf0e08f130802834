"""Ask an endpoint over HTTP, with the standard library and past any proxy. Starting servers does not live here."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tasks.common.errors import Missing
from tasks.serving.protocol.routes import SECRET

TIMEOUT_SECONDS = 60.0
READY_TIMEOUT_SECONDS = 5.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn, in the words of the API (docs/api.md); as it is made here, greedily."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


def complete(url: str, prompt: str, how: Sampling = Sampling(), *, key: str = "", secret: str = "") -> dict[str, Any]:
    """The completion object of POST /v1/completions. ValueError when it is refused, Missing when none answers.

    `secret`: of the endpoint (tasks/serving/protocol/routes.py), where a server's private port is asked.
    """
    return post(f"{url}/v1/completions", {"prompt": prompt, **asdict(how)}, key=key, secret=secret)


def post(url: str, body: Mapping[str, Any], *, key: str = "", secret: str = "") -> dict[str, Any]:
    """The JSON object that a request is answered with. Raises as `complete`."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    headers |= {SECRET: secret} if secret else {}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with _opener.open(request, timeout=TIMEOUT_SECONDS) as reply:
            output: dict[str, Any] = json.load(reply)
            return output
    except urllib.error.HTTPError as error:
        answer = _json_or_none(error)
        known = isinstance(answer, dict) and isinstance(answer.get("error"), dict)
        message = str(answer["error"].get("message")) if known else str(error)
        if error.code < 429:
            raise ValueError(f"{url} refused the request: {message}") from error
        raise Missing(f"{url} does not answer now: {message}", remedy="Try again in a second.") from error
    except (OSError, http.client.HTTPException) as error:
        raise Missing(
            f"{url} does not answer: {error}", remedy="`headway endpoint list` shows what is served."
        ) from error


def ready_state(url: str) -> dict[str, Any] | None:
    """The body of GET /readyz, also when it is not ready; None when nothing, or nothing of ours, answers."""
    try:
        with _opener.open(f"{url}/readyz", timeout=READY_TIMEOUT_SECONDS) as reply:
            state = json.load(reply)
    except urllib.error.HTTPError as error:
        state = _json_or_none(error)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return state if isinstance(state, dict) and "ready" in state else None


def private_state(port: int, path: str, *, token: str) -> dict[str, Any] | None:
    """What a gateway says on its private port; None when it does not answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        with _opener.open(request, timeout=READY_TIMEOUT_SECONDS) as reply:
            output: dict[str, Any] = json.load(reply)
            return output
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException):
        pass
    return None


def _json_or_none(error: urllib.error.HTTPError) -> Any:
    with error:
        try:
            return json.load(error)
        except ValueError:
            return None
