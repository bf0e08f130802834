"""What went wrong at Azure: when a request is sent again, and what is true then, in words, with what to do.

Nothing of a request is quoted here but the service's own code for the error: headers carry signatures.

The defaults of the SDK (60 s of silence, 84 s until a dead endpoint is told, no 429, no Retry-After) are wrong for this work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.core.pipeline import PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import RetryPolicy

from tasks.azure.arm_client import CLI, no_cli
from tasks.common.errors import HeadwayError, IntegrityError, Missing, Refused

CONNECT_SECONDS = 4.0
READ_SECONDS = 7.0
"""Of silence; a stalled chunk is asked for again after them."""
SLOW_READ_SECONDS = 30.0
"""Of silence while the service puts a long list of blocks together, or deletes."""
GIVE_UP_SECONDS = 22.0
"""From the first try: after them no further try is begun, where the service does not answer or fails."""
BUSY_SECONDS = 90.0
"""The same where the service answers that it is busy."""
MOST_RETRIES = 100
"""What ends the retries in practice is the time."""
BUSY = (429, 503)
FAILED = (408, 500, 502, 504)
FIRST_WAIT_SECONDS = 0.4
LONGEST_WAIT_SECONDS = 15.0
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_NOT_OURS = ("location_mode", "hosts", "retry_to_secondary")


class Retries(RetryPolicy[Any, Any]):
    """Sends a request again after a lost connection, silence, a failure of the service, or when it said to come back.

    azure.core's policy, with two differences: every method is sent again, because our writes are conditional or the same each
    time; and a wait that would end after the time limit is not begun, where azure.core looks at the clock after the wait.
    """

    def __init__(self) -> None:
        kinds = ("retry_total", "retry_connect", "retry_read", "retry_status")
        super().__init__(**dict.fromkeys(kinds, MOST_RETRIES))

    def send(self, request: PipelineRequest[Any]) -> PipelineResponse[Any, Any]:
        for name in _NOT_OURS:  # of the SDK's own retries; the transport does not know them
            request.context.options.pop(name, None)
        response = super().send(request)
        response.http_response.location_mode = "primary"  # the SDK reads it from its own retries
        return response

    def configure_retries(self, options: dict[str, Any]) -> dict[str, Any]:
        return super().configure_retries(options) | {"began": time.monotonic(), "methods": METHODS}

    def is_retry(self, settings: dict[str, Any], response: PipelineResponse[Any, Any]) -> bool:
        answer = response.http_response
        if answer.status_code >= 400:
            answer.read()  # an error whose text breaks off on its way is a lost connection, and raised here it is sent again
        return answer.status_code in (*BUSY, *FAILED)

    def increment(self, settings: dict[str, Any], response: Any = None, error: Exception | None = None) -> bool:
        """Count a failure. False when no further try is to follow: the wait before it would end after the time limit."""
        more = super().increment(settings, response, error)
        asked, patience = None, GIVE_UP_SECONDS
        if error is None and response.http_response.status_code in BUSY:
            patience = BUSY_SECONDS
            with suppress(ValueError):
                asked = self.get_retry_after(response)
        settings["wait"] = asked or self.get_backoff_time(settings)
        return more and time.monotonic() - settings["began"] + settings["wait"] <= patience

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        """Seconds: twice as many each time, and never the same for two clients that failed together."""
        longest: float = FIRST_WAIT_SECONDS * 2 ** (MOST_RETRIES - settings["total"] - 1)
        return min(LONGEST_WAIT_SECONDS, longest) * random.uniform(0.75, 1.25)

    def sleep(self, settings: dict[str, Any], transport: Any, response: Any = None) -> None:
        transport.sleep(settings["wait"])


SKEW_SECONDS = 600.0
"""Azure refuses what is dated 15 minutes from its own clock; what is off by less is no reason."""
AGAIN = "Nothing that was published is lost: run the same command again"
_PROTECTED = ("BlobImmutableDueToPolicy", "BlobImmutableDueToLegalHold", "ContainerImmutableStorageWithVersioning")
ARCHIVED = ("BlobArchived", "BlobBeingRehydrated")
"""Answers 409 to whoever reads a blob of the archive tier, until it is back in another one."""


@contextmanager
def told(uri: str, credential: str) -> Iterator[None]:
    """Raise what a person can act on, in place of the SDK's errors."""
    try:
        yield
    except AzureError as error:
        raise explain(error, uri, credential) from error


def code_of(error: AzureError) -> str:
    """The service's own word for an error, such as BlobNotFound; empty without one."""
    code = getattr(error, "error_code", None) or ""
    return str(getattr(code, "value", code))


def corrupted(error: AzureError) -> bool:
    """Whether bytes did not arrive as they left. Azure says Md5Mismatch; Azurite says InvalidOperation, and names the MD5."""
    return getattr(error, "status_code", None) == 400 and "md5" in f"{code_of(error)} {error.message}".lower()


def explain(error: AzureError, uri: str, credential: str) -> HeadwayError:
    """What an error of the SDK means. `uri` is of the store, or of the blob that it was about."""
    status, code = getattr(error, "status_code", None), code_of(error)
    if not isinstance(error, HttpResponseError) or status is None:
        if isinstance(error, ClientAuthenticationError):
            remedy = CLI if no_cli(error) else _REMEDIES[credential]
            return Missing(
                f"{uri}: the credential {credential} gives no token: {_first_line(error)}",
                remedy=f"{remedy} No other credential is tried by itself.",
            )
        return Missing(
            f"{uri} does not answer: {_first_line(error)}",
            remedy=f"Check the network, the account's firewall and the address in stores.yaml. {AGAIN}.",
        )
    if corrupted(error):
        return IntegrityError(
            f"{uri}: what arrives there is not what was sent, each time that it was sent",
            remedy=f"Check what is in between: a proxy, or this machine's memory. {AGAIN}.",
        )
    if code == "ContainerNotFound":
        return Missing(
            f"{uri}: there is no such container",
            remedy="Create it: az storage container create --account-name ACCOUNT --name CONTAINER --auth-mode login",
        )
    if status in (401, 403):
        return _refused(error, uri, credential, code)
    if code in _PROTECTED:
        return Refused(f"{uri}: a policy of immutability protects it ({code})", remedy="Wait until the policy ends.")
    if code in ARCHIVED:
        return Missing(
            f"{uri}: it is in the archive tier, where nobody can read it ({code})",
            remedy="Have it back: az storage blob set-tier --tier Hot ..., which takes up to 15 hours. Rules of lifecycle "
            f"management may not move Headway's blobs to that tier. {AGAIN} then.",
        )
    if status in BUSY:
        return Missing(f"{uri}: the service stays busy ({status} {code})", remedy=f"{AGAIN} later.")
    return Missing(f"{uri}: the service answered {status or 'nothing'} {code}".rstrip(), remedy=f"{AGAIN}.")


def _refused(error: HttpResponseError, uri: str, credential: str, code: str) -> HeadwayError:
    """401 and 403: a clock that is off, a credential that ended, or a right that is not there."""
    # Seconds by which our clock is ahead of the one that answered.
    output = getattr(error.response, "headers", {}).get("Date")
    off = time.time() - parsedate_to_datetime(output).timestamp() if output else 0.0
    if abs(off) > SKEW_SECONDS:
        return Missing(
            f"{uri}: this machine's clock is {abs(off) / 60:.0f} minutes {'ahead of' if off > 0 else 'behind'} Azure's, "
            "which refuses requests that are dated so",
            remedy=f"Set the clock: timedatectl set-ntp true. {AGAIN}.",
        )
    if code in ("AuthorizationPermissionMismatch", "AuthorizationFailure", "InsufficientAccountPermissions"):
        return Missing(
            f"{uri}: the identity behind {credential} may not do this ({code})",
            remedy="Give it the role Storage Blob Data Contributor on the container, and check the account's firewall.",
        )
    return Missing(
        f"{uri}: the credential {credential} is not accepted, or no longer ({code or error.status_code})",
        remedy=f"{_REMEDIES[credential]} {AGAIN}.",
    )


def _first_line(error: AzureError) -> str:
    return next(iter(str(error.message).splitlines()), type(error).__name__)[:300]


_REMEDIES = {
    "cli": "Sign in again: az login.",
    "managed_identity": "Run on a machine with that identity, and name it by `client` where it has several.",
    "workload_identity": "Run in a pod whose service account is federated with that identity.",
    "azureml_user": "Give whoever submits the job the role Storage Blob Data Contributor on the container.",
    "service_principal": "Check whether its secret has expired: az ad app credential list.",
    "connection_string": "Check whether the key was rotated, and export the variable again.",
}
