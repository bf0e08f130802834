"""A run that a signal stopped is cancelled, wherever in the run the signal came."""

from types import SimpleNamespace

import pytest
from pydantic import BaseModel, model_serializer

from deployments.cli.output import describe, exit_code
from tasks.common.claims import ALONE
from tasks.common.errors import Cancelled, JobFailed, Superseded
from tasks.orchestration.observers import interrupted, status_of
from tasks.orchestration.run import Lifecycle

pytestmark = pytest.mark.unit


class TerminationSignal(BaseException):
    """As Prefect's, which its handler of SIGTERM raises."""


class Struck(BaseModel):
    @model_serializer
    def plain(self):
        raise TerminationSignal


class Around(BaseModel):
    inner: Struck = Struck()


def raised(call):
    with pytest.raises(BaseException) as error:
        call()
    return error.value


@pytest.mark.parametrize("call", [Struck().model_dump, Around().model_dump_json], ids=["a cause", "words alone"])
def test_a_signal_that_comes_while_an_extension_calls_python_still_ends_the_run_as_cancelled(call):
    error = raised(call)
    assert isinstance(error, ValueError) and status_of(error) == "cancelled" and exit_code(error) == 130
    assert describe(error)["message"] == "interrupted" and "same command again" in describe(error)["remedy"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TerminationSignal(), "cancelled", 130),
        (KeyboardInterrupt(), "cancelled", 130),
        (Cancelled("stopped"), "cancelled", 130),
        (ValueError("steps 0"), "failed", 2),
        (JobFailed("rank 0: KeyboardInterrupt: ", failure="user", folder="/job"), "failed", 4),
    ],
)
def test_how_a_run_ended_and_its_exit_code_agree(error, status, code):
    assert (status_of(error), exit_code(error)) == (status, code)


def test_a_run_that_another_host_has_did_not_fail():
    assert interrupted(Superseded("runs/r is another's now")) and status_of(Superseded("so")) == "cancelled"


@pytest.mark.parametrize("lost", ["claim", "place_claim"])
def test_a_run_is_ours_only_while_both_its_claims_are(lost):
    """Another run may have the flow and subject although nobody took this run over."""

    class Lost:
        def require(self):
            raise Superseded("another's")

    run = SimpleNamespace(claim=ALONE, place_claim=ALONE)
    Lifecycle.require_ours(run)
    setattr(run, lost, Lost())
    with pytest.raises(Superseded):
        Lifecycle.require_ours(run)
