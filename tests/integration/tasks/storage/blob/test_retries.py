"""What is sent to Azure again, and how long is waited before it: the policy between a real pipeline and answers in memory."""

import io
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ServiceRequestError,
)
from azure.core.pipeline import Pipeline
from azure.core.pipeline.transport import HttpRequest, HttpResponse, HttpTransport

from tasks.storage.blob.faults import LONGEST_WAIT_SECONDS, Retries

BROKEN = (404, {"broken": "yes"})
"""An answer whose text does not come to its end."""


class Answer(HttpResponse):
    """As the SDK's transport gives it: what it says is read when it is asked for."""

    broken = False

    def read(self):
        if self.broken:
            raise IncompleteReadError("half of an error")
        return b""


class Service(HttpTransport):
    """Gives the answers in turn, the last one for ever, and notes what it was sent and how long was waited."""

    def __init__(self, *answers):
        self.answers, self.bodies, self.waits = list(answers), [], []

    def send(self, request, **options):
        assert options == {}
        body = request.body
        self.bodies.append(body.read() if hasattr(body, "read") else body)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        response = Answer(request, None)
        response.broken = answer == BROKEN
        response.status_code, response.headers = answer if isinstance(answer, tuple) else (answer, {})
        return response

    def sleep(self, duration):
        self.waits.append(duration)

    def open(self): ...

    def close(self): ...

    __enter__ = __exit__ = lambda self, *_: None


def asked(service, method="GET", body=None):
    request = HttpRequest(method, "https://account.blob.core.windows.net/c/b", data=body)
    return Pipeline(service, [Retries()]).run(request, location_mode="primary", hosts={}).http_response


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize(
    "first", [ServiceRequestError("reset"), HttpResponseError("half an answer"), 408, 500, 503, 429, BROKEN]
)
def test_every_method_is_sent_again_after_a_loss_or_a_failure(method, first):
    service = Service(first, 200)
    response = asked(service, method, io.BytesIO(b"a block"))
    assert (response.status_code, response.location_mode) == (200, "primary")
    assert service.bodies == [b"a block"] * 2 and 0.3 <= service.waits[0] <= 0.5


@pytest.mark.parametrize("status", [200, 400, 403, 404, 409, 412])
def test_an_answer_is_an_answer_even_with_retry_after(status):
    service = Service((status, {"Retry-After": "1"}))
    assert asked(service).status_code == status and service.waits == []


def test_what_a_credential_says_is_not_asked_again():
    service = Service(ClientAuthenticationError("expired"))
    with pytest.raises(ClientAuthenticationError):
        asked(service)
    assert len(service.bodies) == 1


def test_the_service_says_how_long_to_wait_as_seconds_or_as_a_date():
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=40))
    service = Service((429, {"Retry-After": "5"}), (503, {"Retry-After": at}), (503, {"Retry-After": "soon"}), 200)
    assert asked(service).status_code == 200
    assert service.waits[0] == 5 and 30 < service.waits[1] <= 40 and service.waits[2] < LONGEST_WAIT_SECONDS


@pytest.fixture
def clock(monkeypatch):
    """A service whose waits alone move the clock."""

    def failing(answer):
        service = Service(answer)
        monkeypatch.setattr(time, "monotonic", lambda: sum(service.waits))
        return service

    return failing


def test_a_service_that_fails_is_given_up_in_time_and_its_answer_handed_on(clock):
    service = clock(500)
    assert asked(service).status_code == 500
    assert 8 < sum(service.waits) <= 22 and 6 <= len(service.bodies) <= 7


def test_nobody_there_is_raised_in_time(clock):
    service = clock(ServiceRequestError("nobody listens"))
    with pytest.raises(ServiceRequestError):
        asked(service)
    assert 8 < sum(service.waits) <= 22 and 6 <= len(service.bodies) <= 7


def test_a_busy_service_is_waited_for_longer(clock):
    service = clock((429, {"Retry-After": "8"}))
    assert asked(service).status_code == 429 and service.waits == [8.0] * 11


def test_a_wait_that_would_end_too_late_is_not_begun(clock):
    service = clock((503, {"Retry-After": "3600"}))
    assert asked(service).status_code == 503 and service.waits == []
