"""A lineage as OpenLineage events: what the client's own models take, and a server that refuses everything else."""

import json
import threading
import time
import types
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import attr
import pytest
from openlineage.client import event_v2 as ol
from openlineage.client import facet_v2
from openlineage.client.serde import Serde
from waiting import limit

from tasks.common.errors import Missing
from tasks.lineage.openlineage import events_of, hand_on
from tasks.registry.ancestry import walk
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

FLOW_RUN = "0b6ad0d4-2e16-4f0f-9a4e-7f4f1e1b0001"
CODE = "https://git.example.org/headway.git"
FACETS = {
    each._get_schema(): each
    for module in vars(facet_v2).values()
    if isinstance(module, types.ModuleType)
    for each in vars(module).values()
    if attr.has(each) and hasattr(each, "_get_schema")
}
"""The client's facets by the address of their schema, which each facet names."""


def taken(kind, value):
    """A JSON value as one of the client's models; raises TypeError or ValueError for what is none."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is list:
        return [taken(typing.get_args(kind)[0], each) for each in value]
    if typing.get_origin(kind) is dict:
        return {name: taken(FACETS[each["_schemaURL"]], each) for name, each in value.items()}
    if isinstance(kind, type) and attr.has(kind):
        hints = typing.get_type_hints(kind)
        said = {k: v for k, v in value.items() if k not in ("schemaURL", "_schemaURL")}
        return kind(**{key.lstrip("_"): taken(hints.get(key, str), each) for key, each in said.items()})
    if kind is not typing.Any and not isinstance(value, str if issubclass(kind, ol.RunState) else kind):
        raise TypeError(f"{value!r} is no {kind}")
    return kind(value) if issubclass(kind, ol.RunState) else value


class Server(ThreadingHTTPServer):
    """An OpenLineage server: takes run events that the client's models take, with the right key."""

    daemon_threads = True

    def __init__(self, *, key="", answers=(), pause=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.key, self.answers, self.pause, self.events, self.asked = key, list(answers), pause, [], 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.asked += 1
        time.sleep(server.pause)
        self.send_response(self.verdict(server, body))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def verdict(self, server, body):
        if server.answers:
            return server.answers.pop(0)
        if self.path != "/api/v1/lineage":
            return 404
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            return 401
        if self.headers.get("Content-Type") != "application/json":
            return 415
        try:
            server.events.append(taken(ol.RunEvent, json.loads(body)))
        except (TypeError, ValueError, KeyError):
            return 422
        return 201

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = []

    def start(**options):
        made.append(Server(**options))
        return made[-1]

    yield start
    for each in made:
        each.shutdown()
        each.server_close()


@pytest.fixture
def lineage(tmp_path):
    """A published dataset; a preprocessing that made a tokenizer, and tokens of both; a training; a flow run around them."""
    store, made = LocalStore(tmp_path / "store"), {}

    def make(name, kind, stage, created, inputs=(), context=(), **said):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data").write_text(name)
        read = tuple(made[other] for other in inputs)
        provenance = Provenance(
            name=name, stage=stage, created=f"2026-11-21T{created}+00:00", inputs=read,
            context=tuple(made[other] for other in context), **said,
        )  # fmt: skip
        made[name] = store.publish(folder, kind=kind, inputs=(), provenance=provenance).ref

    run = {"flow": "retrain", "flow_run": FLOW_RUN, "commit": "c" * 40, "dirty": True, "host": "here", "sku": "small"}
    make("raw", "dataset", "publish", "09:00:00")
    make("words", "tokenizer", "preprocess", "10:00:01", ["raw"], key="a" * 64, **run)
    make("tokens", "tokens", "preprocess", "10:00:02", ["raw", "words"], key="a" * 64, **run)
    make("cluster", "qualification", "benchmark", "10:01:00", key="b" * 64, **run)
    make("coder", "checkpoint", "train", "11:00:00", ["tokens"], ["cluster"], key="d" * 64, **run)
    return walk(store, made["coder"]), store.uri


def told(lineage):
    found, store = lineage
    return events_of(found, store=store, seconds={("train", "d" * 64): 600.0}, code=CODE)


def by_job(events, state=ol.RunState.COMPLETE):
    return {event.job.name: event for event in events if event.eventType == state}


def test_each_run_of_a_stage_starts_and_completes_in_the_order_of_time(lineage):
    events = told(lineage)
    assert [(event.eventType.value, event.job.name, event.eventTime[11:19]) for event in events] == [
        ("START", "publish/raw", "09:00:00"), ("COMPLETE", "publish/raw", "09:00:00"),
        ("START", "preprocess/tokens", "10:00:02"), ("COMPLETE", "preprocess/tokens", "10:00:02"),
        ("START", "benchmark/cluster", "10:01:00"), ("COMPLETE", "benchmark/cluster", "10:01:00"),
        ("START", "train/coder", "10:50:00"), ("COMPLETE", "train/coder", "11:00:00"),
    ]  # fmt: skip
    assert len({event.run.runId for event in events}) == 4
    assert told(lineage) == events, (
        "the same lineage gives the same events, and a server that is told twice knows them once"
    )


def test_what_a_run_read_and_made_and_where_its_code_is(lineage):
    done = by_job(told(lineage))
    tokens, train = done["preprocess/tokens"], done["train/coder"]
    assert [(each.namespace, each.name) for each in tokens.inputs] == [(lineage[1], "dataset/raw")]
    assert [each.name for each in tokens.outputs] == ["tokenizer/words", "tokens/tokens"]
    assert {each.name for each in train.inputs} == {"tokens/tokens", "qualification/cluster"}
    (made,) = train.outputs
    assert made.facets["version"].datasetVersion == lineage[0]["root"].rpartition("@")[2]
    assert (
        made.facets["dataSource"].uri.startswith("file:///")
        and "checkpoint coder" in made.facets["documentation"].description
    )
    assert (made.outputFacets["outputStatistics"].size, made.outputFacets["outputStatistics"].fileCount) == (5, 1)
    code = train.job.facets["sourceCodeLocation"]
    assert (code.type, code.url, code.version) == ("git", CODE, "c" * 40)
    parent = train.run.facets["parent"]
    assert (parent.run.runId, parent.job.name) == (FLOW_RUN, "retrain")
    assert {(tag.key, tag.value) for tag in train.run.facets["tags"].tags} == {
        ("host", "here"),
        ("sku", "small"),
        ("dirty", "true"),
    }
    assert by_job(told(lineage), ol.RunState.START)["train/coder"].outputs == []


def test_a_file_holds_one_event_a_line_that_the_clients_models_take(lineage, tmp_path):
    events = told(lineage)
    hand_on(events, str(tmp_path / "new" / "events.jsonl"))
    lines = (tmp_path / "new" / "events.jsonl").read_text().splitlines()
    assert [Serde.to_dict(taken(ol.RunEvent, json.loads(line))) for line in lines] == [
        json.loads(line) for line in lines
    ]
    assert len(lines) == len(events) and [path.name for path in (tmp_path / "new").iterdir()] == ["events.jsonl"]


def test_the_server_of_these_tests_refuses_a_wrong_body_address_and_key(server):
    import requests

    there = server(key="right-key")
    run, job = ol.Run(FLOW_RUN), ol.Job("n", "j")
    event = ol.RunEvent(
        eventType=ol.RunState.START, eventTime="2026-11-21T09:00:00+00:00", run=run, job=job, producer="urn:x"
    )
    good = Serde.to_dict(event)
    bearer = {"Authorization": "Bearer right-key"}

    def post(value, path="/api/v1/lineage", headers=bearer):
        return requests.post(there.url + path, json=value, headers=headers, timeout=10).status_code

    assert post(good) == 201
    wrong = [
        {**good, "run": {"runId": "no uuid"}}, {**good, "eventTime": "yesterday"}, {**good, "job": {"name": "j"}},
        {**good, "eventType": "BEGIN"}, {**good, "extra": 1}, {**good, "inputs": [{"namespace": "n", "name": 3}]},
        {**good, "run": {"runId": FLOW_RUN, "facets": {"parent": {"_schemaURL": "https://example.org/none"}}}},
    ]  # fmt: skip
    assert [post(each) for each in wrong] == [422] * len(wrong)
    assert (post(good, path="/other"), post(good, headers={})) == (404, 401)


def test_a_server_is_told_everything_in_order_with_the_key(lineage, server):
    there, events = server(key="right-key"), told(lineage)
    hand_on(events, there.url, key="right-key")
    assert [Serde.to_dict(event) for event in there.events] == [Serde.to_dict(event) for event in events]
    hand_on(events[:1], f"{there.url}/api/v1/lineage", key="right-key")
    assert there.events[-1].eventType == ol.RunState.START


def test_a_server_that_is_busy_once_is_asked_again(lineage, server):
    there = server(answers=[503])
    hand_on(told(lineage), there.url)
    assert len(there.events) == 8 and there.asked == 9


@pytest.mark.parametrize(
    ("answers", "said"), [([201, 201, 422], "answered 422; it took 2 of 8"), ([503] * 9, "took 0 of 8")]
)
def test_a_server_that_does_not_take_them_is_named_with_what_it_took(lineage, server, answers, said):
    there = server(answers=answers)
    with pytest.raises(Missing, match=said) as raised:
        hand_on(told(lineage), there.url)
    assert (
        there.url in str(raised.value) and "OPENLINEAGE_API_KEY" in raised.value.remedy and raised.value.exit_code == 6
    )


def test_a_server_that_is_away_fails_at_once(lineage, server):
    there = server()
    there.shutdown()
    there.server_close()
    began = time.monotonic()
    with pytest.raises(Missing, match="does not answer"):
        hand_on(told(lineage), there.url)
    assert time.monotonic() - began < limit(5)


def test_an_address_of_another_kind_is_a_mistake(lineage):
    with pytest.raises(ValueError, match="neither a file nor an address"):
        hand_on(told(lineage), "kafka://broker/topic")
