"""When a request to Azure is sent again, and how long it is waited for. What an error means to a person is faults.py.

The defaults of the SDK (60 s of silence, 84 s until a dead endpoint is told, no 429, no Retry-After) are wrong for this work.
"""

from __future__ import annotations

import email.utils
import random
import time
from typing import Any

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.core.pipeline import PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import HTTPPolicy

CONNECT_SECONDS = 4.0
READ_SECONDS = 7.0
"""Of silence; a stalled chunk is asked for again after them."""
SLOW_READ_SECONDS = 30.0
"""Of silence while the service puts a long list of blocks together, or deletes."""
GIVE_UP_SECONDS = 22.0
"""From the first try: after them no further try is begun, where the service does not answer or fails."""
BUSY_SECONDS = 90.0
"""The same where the service answers that it is busy."""
MOST_FAILURES = 6
BUSY = (429, 503)
FAILED = (408, 500, 502, 504)
FIRST_WAIT_SECONDS = 0.4
LONGEST_WAIT_SECONDS = 15.0
_NOT_OURS = ("location_mode", "hosts", "retry_to_secondary")


class Retries(HTTPPolicy[Any, Any]):
    """Sends a request again after a lost connection, silence, a failure of the service, or when it said to come back."""

    def send(self, request: PipelineRequest[Any]) -> PipelineResponse[Any, Any]:
        for name in _NOT_OURS:  # of the SDK's own retries; the transport does not know them
            request.context.options.pop(name, None)
        began, tries = time.monotonic(), 0
        wait: float | None
        while True:
            tries += 1
            try:
                response = self.next.send(request)
            except AzureError as error:
                wait = _wait(tries)
                if not _lost(error) or tries >= MOST_FAILURES or time.monotonic() - began + wait > GIVE_UP_SECONDS:
                    raise
            else:
                wait, patience = _asked(response, tries)
                if wait is None or time.monotonic() - began + wait > patience:
                    response.http_response.location_mode = "primary"  # the SDK reads it from its own retries
                    return response
                response.http_response.internal_response.close()
            time.sleep(wait)
            if hasattr(request.http_request.body, "seek"):
                request.http_request.body.seek(0)


def _lost(error: AzureError) -> bool:
    """Whether there was no answer, or half of one; what a credential says is no loss, and comes back each time."""
    half = isinstance(error, HttpResponseError) and error.status_code is None
    return isinstance(error, ServiceRequestError | ServiceResponseError) or (
        half and not isinstance(error, ClientAuthenticationError)
    )


def _asked(response: PipelineResponse[Any, Any], tries: int) -> tuple[float | None, float]:
    """Seconds until the next try, None for no further one; and how long to go on trying."""
    status = response.http_response.status_code
    if status in BUSY:
        return _retry_after(response.http_response.headers.get("Retry-After")) or _wait(tries), BUSY_SECONDS
    if status in FAILED and tries < MOST_FAILURES:
        return _wait(tries), GIVE_UP_SECONDS
    return None, 0.0


def _wait(tries: int) -> float:
    """Twice as long each time, and never the same for two clients that failed together."""
    longest: float = FIRST_WAIT_SECONDS * 2 ** (tries - 1)
    return min(LONGEST_WAIT_SECONDS, longest) * random.uniform(0.75, 1.25)


def _retry_after(text: str | None) -> float | None:
    """Seconds that a service asks for, given as seconds or as a date."""
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
