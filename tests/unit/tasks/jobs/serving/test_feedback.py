"""A label is joined to the request that it is about, by who asked it; and what is kept of texts, where they are kept."""

import json
import os

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tasks.common.seal import opened
from tasks.config.serving import AnswersConfig
from tasks.formats.answers import Answer, Expected, line, refuses, unparsed
from tasks.jobs.serving import feedback
from tasks.jobs.serving.feedback import MOST_LABEL_SEGMENTS, router
from tasks.jobs.serving.outputs import REMEMBERED, Outputs, looked_at
from tasks.serving.monitor.measures import read

pytestmark = pytest.mark.unit

MODEL = "model/tiny@" + "a" * 64
SECRET = "hwt_0123456789abcdefghijABCDEFGHIJ"


class Server:
    """One server of an endpoint, as callers meet it: their name comes in a header, as the edge gives it."""

    def __init__(self, folder, server="one", **settings):
        self.outputs = Outputs(folder, server, AnswersConfig(**settings))
        self.outputs.counting = True
        app = FastAPI()
        app.include_router(router(self.outputs, lambda request: request.headers.get("x-headway-caller", "")))
        self.client = TestClient(app, raise_server_exceptions=False)

    def answered(self, identity, *, caller="", **more):
        with self.outputs.measuring(8) as found:
            found |= {"id": identity, "caller": caller, "model": MODEL, "finish_reason": "stop", **more}

    def label(self, identity, *, caller="", **said):
        said = said or {"label": "right"}
        return self.client.post(
            "/v1/feedback", json={"request_id": identity, **said}, headers={"x-headway-caller": caller}
        )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "outputs" / ("a" * 64)


@pytest.fixture
def server(folder):
    made = Server(folder)
    yield made
    made.outputs.close()


def test_a_label_is_joined_to_its_request_and_the_last_one_counts(server, folder):
    server.answered("r1", caller="tickets")
    server.answered("r2", caller="tickets")
    said = server.label("r1", caller="tickets", label="wrong")
    assert (said.status_code, said.json()) == (
        200,
        {"request_id": "r1", "model": MODEL, "right": 0.0, "comment_kept": False},
    )
    assert server.label("r2", caller="tickets", score=0.75).json()["right"] == 0.75
    assert server.label("r1", caller="tickets", label="right", comment="on second thought").status_code == 200
    told = read(folder)
    assert [(one.id, one.right, one.model, one.caller, one.comment) for one in told.labels] == [
        ("r2", 0.75, MODEL, "tickets", ""),
        ("r1", 1.0, MODEL, "tickets", ""),
    ]
    asked = {answer.id: answer.time for answer in server.outputs._recent.values()}
    assert all(one.asked == asked[one.id] <= one.time for one in told.labels)
    kept = b"".join(path.read_bytes() for path in folder.rglob("*.jsonl"))
    assert b"thought" not in kept


def test_only_who_asked_may_label_and_nobody_learns_more_than_that_it_is_unknown(server):
    server.answered("r1", caller="tickets")
    server.answered("r1", caller="search")  # the same id of another caller is another request
    server.answered("failed", caller="tickets", status=503)
    refused = [server.label("r1", caller="stranger"), server.label("r1"), server.label("never", caller="tickets")]
    refused.append(server.label("failed", caller="tickets"))
    assert {one.status_code for one in refused} == {404}
    assert len({one.json()["detail"].replace("never", "r1").replace("failed", "r1") for one in refused}) == 1
    assert server.label("r1", caller="tickets").status_code == server.label("r1", caller="search").status_code == 200


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"label": "right", "score": 1.0},
        {"label": "good"},
        {"score": 1.5},
        {"score": "NaN"},
        {"label": "right", "comment": "x" * 2001},
        {"label": "right", "more": 1},
        {"label": "right", "request_id": "../../etc"},
        {"label": "right", "request_id": "x" * 129},
    ],
)
def test_a_body_that_is_no_feedback_is_refused(server, said):
    server.answered("r1")
    body = {"request_id": "r1", **said}
    assert server.client.post("/v1/feedback", json=body).status_code == 422  # the server's own handler says 400


def test_another_server_of_the_endpoint_and_one_that_started_again_know_the_request(server, folder):
    server.answered("r1", caller="tickets", text='he said "id":"r3"')
    server.outputs.close()
    other = Server(folder.parent / ("b" * 64), "two")  # a newer model, beside it
    try:
        assert other.label("r1", caller="tickets").status_code == 200
        assert other.label("r1", caller="search").status_code == other.label("r3", caller="tickets").status_code == 404
        (path,) = folder.glob("*.jsonl")
        path.write_bytes(path.read_bytes() + b'{"time":1.0,"id":"r4","cal')  # a kill
        assert other.label("r4").status_code == 404
    finally:
        other.outputs.close()


def test_what_is_remembered_and_what_is_kept_is_bounded(folder, monkeypatch):
    server = Server(folder)
    for number in range(REMEMBERED + 5):
        server.outputs._remember(Answer(1.0, 0.1, 8, id=f"r{number}", prompt="p", text="t"))
    assert len(server.outputs._recent) == REMEMBERED and ("r0", "") not in server.outputs._recent
    assert all(answer.text is None and answer.prompt is None for answer in server.outputs._recent.values())
    (folder / "feedback").mkdir(parents=True)
    for number in range(MOST_LABEL_SEGMENTS + 3):
        path = folder / "feedback" / f"old-{number:06d}.jsonl"
        path.write_text("{}\n")
        os.utime(path, (number, number))
    server.answered("r1")
    assert server.label("r1").status_code == 200
    left = sorted(path.name for path in (folder / "feedback").glob("*.jsonl"))
    assert len(left) == MOST_LABEL_SEGMENTS and left[0] == "old-000004.jsonl" and left[-1] == "one-000001.jsonl"
    monkeypatch.setattr(feedback, "LOOKS", 0)
    busy = server.label("r1")
    assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
    server.outputs.close()


def test_a_disk_that_is_full_is_told(server, folder):
    server.answered("r1")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "feedback").write_text("no folder")
    assert server.label("r1").status_code == 503


def lines(folder):
    return [
        Answer(**json.loads(opened(one, where="line")))
        for path in folder.glob("*.jsonl")
        for one in path.read_bytes().splitlines()
    ]


def test_texts_are_kept_only_where_that_is_wanted_without_secrets_and_cut(folder, tmp_path):
    answer = {"prompt": f"my token is {SECRET}, use it", "text": "I'm sorry, " + "x" * 50, "completion_tokens": 9}
    plain = Server(folder)
    plain.answered("r1", **answer)
    plain.outputs.close()
    (told,) = lines(folder)
    assert (told.prompt, told.text, told.refused, told.unparsed) == (None, None, True, None)
    kept = Server(tmp_path / "kept" / ("a" * 64), keep_text=True, most_characters=30)
    kept.answered("r1", **answer)
    assert kept.label("r1", label="wrong", comment=f"it leaks {SECRET}").json()["comment_kept"]
    kept.outputs.close()
    (told,) = lines(kept.outputs.folder)
    assert told.prompt == "my token is [redacted], use it" and told.text == ("I'm sorry, " + "x" * 50)[:30]
    (label,) = read(kept.outputs.folder).labels
    assert label.comment == "it leaks [redacted]"
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in kept.outputs.folder.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("prompt", "text", "expects", "found"),
    [
        ("", '{"a": [1, 2]}', "json", False),
        ("", '{"a": [1, 2', "json", True),
        ("", "[" * 5000, "json", True),
        ("def f(x):\n    ", "return x\n", "python", False),
        ("def f(x):\n    ", "return (x\n", "python", True),
        ("", "(" * 5000, "python", True),
        ("", "\x00", "python", True),
        ("", "anything", "", None),
        ("", "x" * 20_001, "python", None),
    ],
)
def test_what_is_not_as_expected_is_counted(prompt, text, expects: Expected, found):
    assert unparsed(prompt, text, expects, finish_reason="stop") is found
    assert unparsed(prompt, text, expects, finish_reason="length") is None
    settings = AnswersConfig(expects=expects)
    assert looked_at(Answer(1.0, 0.1, 8, finish_reason="stop", prompt=prompt, text=text), settings).unparsed is found


def test_a_refusal_is_known_by_how_it_begins():
    for text in (
        "I'm sorry, but I can't help.",
        "As an AI language model, I",
        "I cannot do that",
        "Well, I\u2019m unable to",
    ):
        assert refuses(text) is True
    for text in ("def refuse():\n    return 1", "The cat is sorry.", "x" * 300 + "I cannot", "I can do that"):
        assert refuses(text) is False
    assert refuses("  ") is None


def test_a_line_of_an_older_release_is_read_and_a_newer_one_is_no_longer_than_it_must_be(folder):
    old = {"time": 1.0, "seconds": 0.1, "max_tokens": 8, "status": 200, "error": "", "odd": None, "repetition": 0.5}
    folder.mkdir(parents=True)
    (folder / "s-000001.jsonl").write_bytes(
        json.dumps(old).encode() + b"\n" + line(Answer(2.0, 0.1, 8, rung="smaller"))
    )
    one, other = read(folder).answers
    assert (one.id, one.rung, one.repetition, other.rung) == ("", "", 0.5, "smaller")
    shortest = opened(line(Answer(2.0, 0.1, 8)).removesuffix(b"\n"), where="line")
    assert shortest == b'{"time":2.0,"seconds":0.1,"max_tokens":8,"status":200}'


def test_who_goes_away_before_the_answer_is_whole_is_nobodys_failure(server, folder):
    def pieces():
        with server.outputs.measuring(8) as found:
            found |= {"id": "gone"}
            yield 1
            yield 2

    one = pieces()
    next(one)
    one.close()
    server.outputs.close()
    (told,) = lines(folder)
    assert (told.status, told.error) == (499, "Closed") and read(folder).answers == []
