"""What went wrong at Azure, in words: what is true, and what to do. Sending again is retries.py's.

Nothing of a request is quoted here but the service's own code for the error: headers carry signatures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from tasks.common.errors import HeadwayError, IntegrityError, Missing, Refused
from tasks.storage.blob.retries import BUSY

SKEW_SECONDS = 600.0
"""Azure refuses what is dated 15 minutes from its own clock; what is off by less is no reason."""
AGAIN = "Nothing that was published is lost: run the same command again"
_PROTECTED = ("BlobImmutableDueToPolicy", "BlobImmutableDueToLegalHold", "ContainerImmutableStorageWithVersioning")


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
            return Missing(
                f"{uri}: the credential {credential} gives no token: {_first_line(error)}",
                remedy=f"{_REMEDIES[credential]} No other credential is tried by itself.",
            )
        return Missing(
            f"{uri} does not answer: {_first_line(error)}",
            remedy=f"Look at the network, at the account's firewall and at the address in stores.yaml. {AGAIN}.",
        )
    if corrupted(error):
        return IntegrityError(
            f"{uri}: what arrives there is not what was sent, each time that it was sent",
            remedy=f"Look at what stands between: a proxy, or this machine's memory. {AGAIN}.",
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
            remedy="Give it the role Storage Blob Data Contributor on the container, and look at the account's firewall.",
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
    "service_principal": "Look whether its secret has ended: az ad app credential list.",
    "connection_string": "Look whether the key was rotated, and export the variable anew.",
}
