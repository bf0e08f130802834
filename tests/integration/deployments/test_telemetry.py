"""Run folders become traces, metrics and logs: told once whatever is killed, to every backend, and without secrets."""

import contextlib
import gzip
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import run_folders as folders
import yaml
from prometheus_client.parser import text_string_to_metric_families
from waiting import limit, until

from deployments.configuration.platform import PlatformConfig
from deployments.telemetry import export
from deployments.telemetry import instruments as of
from deployments.telemetry.alert_rules import RULES
from deployments.telemetry.export import Telemetry
from deployments.telemetry.measure import Host
from deployments.telemetry.monitors import ROWS, camel, dashboard, queries
from deployments.telemetry.runs import Ledger
from deployments.telemetry.sinks import FileSink
from deployments.telemetry.trace_builder import Log
from tasks.common import process
from tasks.registry.versions import publish
from tasks.security.audit import acting, audit
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

ROOT = Path(__file__).parents[3]
KEY = "11111111-2222-3333-4444-555555555555"
NOW = 2_000_000_000.0
SMI = "0, NVIDIA H100 80GB HBM3, 37, 1024, 81559, 41, 312.50\n1, NVIDIA H100 80GB HBM3, [N/A], 2048, 81559, 40, [Not Supported]\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def settings(**telemetry):
    return PlatformConfig.model_validate(
        {"telemetry": {"metrics_seconds": 1e-6, "interval_seconds": 1e-6, **telemetry}}
    )


def measured(here, kind, name, metrics, *, at):
    """An artifact with figures in the store of a home."""
    folder = here.parent / f"{kind}-{name}-{at}"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([name, at]))
    made = Provenance(name=name, created=datetime.fromtimestamp(at, UTC).isoformat(), metrics=metrics)
    publish(open_store(here), folder, kind=kind, inputs=(), provenance=made)


def told(here, **telemetry):
    """One look at a here."""
    made = Telemetry(here, settings(**{"prometheus": False, **telemetry}))
    made.tick(NOW)
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def values(attributes):
    return {one["key"]: next(iter(one["value"].values())) for one in attributes}


def spans(here):
    found = [
        s
        for line in lines(here / "telemetry" / "traces.jsonl")
        for r in line["resourceSpans"]
        for s in of_scopes(r, "scopeSpans", "spans")
    ]
    return [{**span, "attributes": values(span["attributes"])} for span in found]


def logs(here):
    found = [
        x
        for line in lines(here / "telemetry" / "logs.jsonl")
        for r in line["resourceLogs"]
        for x in of_scopes(r, "scopeLogs", "logRecords")
    ]
    return [{**log, "attributes": values(log["attributes"])} for log in found]


def of_scopes(resource, scopes, items):
    return [item for scope in resource[scopes] for item in scope[items]]


def scraped(made):
    with urllib.request.urlopen(made.url, timeout=limit(10)) as answer:
        return answer.read().decode()


def figures(made):
    """Samples of a scrape, by name and the labels' values in the order of the instrument."""
    order = {instrument.prometheus: instrument.labels for instrument in of.ALL}
    found = {}
    for family in text_string_to_metric_families(scraped(made)):
        for sample in family.samples:
            name = sample.name
            labels = order[name if name in order else re.sub("_(bucket|count|sum)$", "", name)]
            found[sample.name, *(sample.labels[label] for label in labels)] = sample.value
    return found


def up_to_date(made):
    """Look until nothing is left to be told."""
    for tick in range(1, 1000):
        made.tick(NOW + tick)
        if not any(way.behind(made._runs.sizes()) for way in (made._counter, *(way for _, way in made._sinks))):
            return
    raise AssertionError("it did not get through")


def events(here):
    """Every event that becomes a log record, as RUN:OFFSET."""
    found = []
    for path in (here / "runs").glob("*/events.jsonl"):
        end = 0
        for line in path.read_bytes().splitlines(keepends=True):
            end += len(line)
            found += [f"{path.parent.name}:{end}"] if b'"event": "progress"' not in line else []
    return sorted(found)


# ---- traces and logs


def test_a_run_is_a_trace_with_a_span_for_each_stage(here):
    folders.Run(here, "a").stage("validate", metrics={"rows": 7.5}).stage("train", "reused").close()
    told(here)
    validate, train, run = spans(here)
    assert [validate["name"], train["name"], run["name"]] == ["validate", "train", "retrain tiny"]
    assert {validate["traceId"], train["traceId"]} == {run["traceId"]} and len(run["traceId"]) == 32
    assert validate["parentSpanId"] == train["parentSpanId"] == run["spanId"] and "parentSpanId" not in run
    assert int(run["startTimeUnixNano"]) < int(validate["startTimeUnixNano"]) < int(validate["endTimeUnixNano"])
    assert run["status"] == {"code": 1} and run["attributes"]["headway.subject"] == "tiny"
    assert validate["attributes"]["headway.metric.rows"] == 7.5 and train["attributes"]["headway.status"] == "reused"
    assert [log["body"]["stringValue"].split(": ")[1] for log in logs(here)] == [
        *("opened", "validate began", "validate ran, 0.5 s", "train began", "train reused, 0.5 s", "completed")
    ]
    assert {log["traceId"] for log in logs(here)} == {run["traceId"]}


def test_what_went_wrong_is_an_error_with_its_message(here):
    folders.failed(here, "a", "no room")
    folders.gate_closed(here, "b")
    folders.Run(here, "c").close("cancelled", KeyboardInterrupt())
    told(here)
    roots = {span["attributes"]["headway.run"]: span for span in spans(here) if "parentSpanId" not in span}
    assert roots["a"]["status"] == {"code": 2, "message": "no room"}
    assert (
        roots["a"]["attributes"]["error.type"] == "RuntimeError"
        and roots["a"]["attributes"]["headway.stage"] == "train"
    )
    assert roots["b"]["status"]["code"] == 2 and roots["c"]["status"] == {"code": 1}
    ends = {log["attributes"]["headway.run"]: log for log in logs(here) if log["eventName"] == "headway.closed"}
    assert [ends[run]["severityText"] for run in "abc"] == ["ERROR", "WARN", "WARN"]
    assert ends["a"]["attributes"]["exception.message"] == "no room"
    gate = next(log for log in logs(here) if log["attributes"].get("headway.status") == "gate_closed")
    assert "rows: 3, limit >= 10" in gate["body"]["stringValue"]


def test_a_gate_that_closes_between_stages_ends_its_stage_once(here):
    run = folders.Run(here, "a").stage("evaluate")
    run.log.ended(folders.Outcome("evaluate", "gate_closed", 0.5))
    run.close("gate_closed", RuntimeError("worse than the champion"), "evaluate")
    told(here)
    assert [(span["name"], span["attributes"]["headway.status"]) for span in spans(here)] == [
        ("evaluate", "ran"),
        ("retrain tiny", "gate_closed"),
    ]


def test_a_run_that_died_and_was_resumed_is_one_trace_with_two_openings(here):
    folders.died(here, "a")
    told(here)
    assert [span["name"] for span in spans(here)] == ["validate"]
    folders.Run(here, "a").stage("validate", "reused").stage("train").close()
    told(here)
    found = spans(here)
    assert len({span["traceId"] for span in found}) == 1 and len({span["spanId"] for span in found}) == len(found) == 6
    ends = [
        (span["name"], span["attributes"]["headway.opening"], span["attributes"]["headway.status"]) for span in found
    ]
    assert ends == [
        *(("validate", "1", "ran"), ("train", "1", "died"), ("retrain tiny", "1", "died")),
        *(("validate", "2", "reused"), ("train", "2", "ran"), ("retrain tiny", "2", "completed")),
    ]


def test_the_same_run_has_the_same_ids_however_often_it_is_told(here, tmp_path):
    folders.completed(here, "a")
    told(here)
    shutil.copytree(here, tmp_path / "again", ignore=shutil.ignore_patterns("telemetry"))
    told(tmp_path / "again")
    assert spans(here) == spans(tmp_path / "again") and logs(here) == logs(tmp_path / "again")


def test_odd_folders_and_half_lines_are_no_error_and_hide_nothing(here):
    folders.completed(here, "good")
    half = folders.Run(here, "half").stage("validate")
    with open(here / "runs" / "half" / "events.jsonl", "a") as file:
        file.write('not json\n[1]\n{"event": 3}\n{"event": "started", "time": "soon"}\n{"event": "started", "ti')
    (here / "runs" / "empty").mkdir()
    (here / "runs" / "file").write_text("x")
    (here / "runs" / "good" / "handle.json").write_text("{half")
    (here / "jobs" / "odd").mkdir(parents=True)
    for name in ("handle.json", "exit.json", "config.json", "metrics.jsonl"):
        (here / "jobs" / "odd" / name).write_bytes(b"\xff\x00[")
    (here / "platform").mkdir()
    (here / "platform" / "alerts.json").write_text("[]")
    (here / "platform" / "metrics.json").write_text("{")
    made = told(here, prometheus=True)
    assert [span["name"] for span in spans(here)].count("validate") == 2
    half.log = folders.RunLog(here, "half")  # a retry goes on behind the half line
    half.log.opened(half)
    half.stage("validate", "reused").close()
    made.tick(NOW + 1)
    assert [s["attributes"]["headway.status"] for s in spans(here) if s["attributes"]["headway.run"] == "half"] == [
        *("ran", "died", "reused", "completed")
    ]


# ---- nothing twice, nothing lost


def test_a_watch_that_is_killed_at_any_moment_tells_everything_once(here, monkeypatch):
    monkeypatch.setattr(export, "EVENTS_AT_ONCE", 3)
    chance = random.Random(7)
    kills = 0
    for number in range(8):
        for which in range(4):
            folders.completed(here, f"{number}-{which}", subject=f"m{which}")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                made = Telemetry(here, settings(prometheus=False))
                for tick in range(10_000):
                    made.tick(NOW + tick)
            os._exit(0)
        time.sleep(chance.uniform(0.05, 0.5))
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    made = Telemetry(here, settings(prometheus=True))
    up_to_date(made)
    assert kills == 8
    assert sorted(log["attributes"]["log.record.uid"] for log in logs(here)) == events(here)
    assert len({span["spanId"] for span in spans(here)}) == len(spans(here)) == 32 * 3
    counted = figures(made)
    assert [counted["headway_runs_total", "retrain", f"m{which}", "completed"] for which in range(4)] == [8.0] * 4
    assert counted["headway_stage_duration_seconds_count", "retrain", "train", "ran"] == 32


def test_finished_runs_are_not_opened_again(here):
    """300 folders: a look at nothing new opens no log. What it costs is in docs/monitoring.md."""
    folders.completed(here, "0")
    for number in range(1, 300):
        shutil.copytree(here / "runs" / "0", here / "runs" / str(number))
    made = told(here)
    up_to_date(made)
    opened, watching = [], False
    sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" and watching else None)
    watching = True
    began = time.process_time()
    for tick in range(10):
        made.tick(NOW + 10_000 + tick)
    watching = False
    assert not [path for path in opened if path.endswith("events.jsonl")] and len(opened) > 0
    assert time.process_time() - began < limit(2.0)
    assert len(logs(here)) == 6 * 300


def test_a_full_file_is_rotated_and_a_tail_that_nobody_remembers_is_cut_off(tmp_path):
    sink = FileSink(tmp_path, ledger := Ledger(tmp_path / "ledger.db"), limit=1000)
    for number in range(10):
        assert sink.send([], [Log("x", float(number), "INFO", "y" * 100, {})])
        ledger.advance("file", sink.marks())
    with open(tmp_path / "logs.jsonl", "a") as file:
        file.write('{"half')
    assert sink.send([], [Log("x", 10.0, "INFO", "z", {})])
    assert (tmp_path / "logs.jsonl.1").stat().st_size > 1000
    assert all("resourceLogs" in line for name in ("logs.jsonl", "logs.jsonl.1") for line in lines(tmp_path / name))


def test_a_damaged_ledger_is_put_aside(here):
    folders.completed(here, "a")
    (here / "telemetry").mkdir()
    (here / "telemetry" / "ledger.db").write_bytes(b"this is no database, whatever its name says" * 100)
    told(here)
    assert len(spans(here)) == 3 and (here / "telemetry" / "ledger.db.damaged").exists()


# ---- figures


def test_metrics_is_served_on_loopback_at_the_same_place_after_a_restart(here):
    folders.completed(here, "a")
    serve = "from deployments.telemetry.export import Scrape, serve; print(serve(Path(sys.argv[1]), Scrape()))"
    argv = [sys.executable, "-c", f"import sys; from pathlib import Path; {serve}", str(here)]
    first = subprocess.run(argv, capture_output=True, text=True, timeout=limit(60), check=True)
    made = told(here, prometheus=True)
    assert made.url == first.stdout.strip() == process.read_json(here / "platform" / "metrics.json")["url"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", made.url)
    assert figures(made)["headway_runs_total", "retrain", "tiny", "completed"] == 1
    second = told(here, prometheus=True)  # its port is taken now
    assert second.url != made.url and figures(second)["headway_runs_total", "retrain", "tiny", "completed"] == 1


def test_running_stages_and_training_have_gauges_that_go_when_they_end(here):
    run = folders.Run(here, "a")
    run.log.started("train", None)
    run.progress("train", 30, 60, "loss 2.5")
    code = (
        "time.sleep(0.2)\nif not (folder / 'again').exists(): (folder / 'again').touch(); sys.exit(1)\ntime.sleep(600)"
    )
    folder = folders.job(here, "train-abc", code, restarts=3)
    folders.metrics(folder, step=29, loss=2.6, tokens_per_second=900.0)
    folders.metrics(folder, step=30, loss=2.5, tokens_per_second=1000.0)
    until(lambda: (process.read_json(folder / "attempts.json") or {}).get("attempts") == 2)
    made = told(here, prometheus=True)
    found = figures(made)
    assert found["headway_runs_running", "retrain", "tiny"] == 1
    assert found["headway_stage_done_ratio", "retrain", "tiny", "train"] == 0.5
    assert time.time() - found["headway_stage_progress_time_seconds", "retrain", "tiny", "train"] < limit(60)
    assert [found[f"headway_training_{name}", "tiny"] for name in ("loss", "tokens_per_second", "step")] == [
        2.5,
        1000,
        30,
    ]
    assert found["headway_job_restarts_total", "train"] == 1
    process.stop(folder)
    run.close()
    made.tick(time.time() + 10_000)
    assert {name for name, *_ in figures(made)} & {
        "headway_runs_running",
        "headway_stage_done_ratio",
        "headway_training_loss",
    } == set()
    assert figures(made)["headway_job_restarts_total", "train"] == 1


def test_the_newest_figures_of_models_and_datasets_are_gauges_of_bounded_number(here, monkeypatch):
    monkeypatch.setattr(export, "QUALITY_NAMES", 2)
    measured(here, "evaluation", "a", {"accuracy": 0.5, "seconds.of.mine": 3.0}, at=NOW)
    measured(here, "drift", "web", {"domain_auc": 0.9, "p_value": 0.01}, at=NOW)
    look = export.Quality(here)

    def points(now):
        return {(*point.labels, point.value) for point in look.look(now)}

    assert points(NOW) == {("a", "accuracy", 0.5), ("web", "domain_auc", 0.9), ("web", "p_value", 0.01)}
    measured(here, "evaluation", "a", {"accuracy": 0.6}, at=NOW + 1)
    assert ("a", "accuracy", 0.5) in points(NOW + 1), "the store is asked once a minute"
    assert ("a", "accuracy", 0.6) in points(NOW + 61)
    for number in range(3):
        measured(here, "evaluation", f"b{number}", {"accuracy": 0.1}, at=NOW + 10 + number)
    names = {point.labels[0] for point in look.look(NOW + 200) if point.instrument is of.EVALUATED}
    assert names == {"b1", "b2"}


def test_a_run_that_went_wrong_is_a_gauge_until_one_succeeds(here):
    folders.failed(here, "a")
    folders.gate_closed(here, "b", subject="other")
    made = told(here, prometheus=True)
    found = {key[1:] for key in figures(made) if key[0] == "headway_run_failing_time_seconds"}
    assert found == {("retrain", "tiny", "failed"), ("retrain", "other", "gate_closed")}
    assert figures(made)["headway_gates_closed_total", "retrain", "other", "validate"] == 1
    folders.completed(here, "c")
    made.tick(NOW + 1)
    found = {key[1:] for key in figures(made) if key[0] == "headway_run_failing_time_seconds"}
    assert found == {("retrain", "other", "gate_closed")}


def test_the_end_of_a_failed_jobs_log_is_told_once(here):
    folder = folders.job(here, "train-abc", "print('step 7'); raise MemoryError('no memory left')")
    until(lambda: process.read_json(folder / "exit.json"))
    made = told(here)
    made.tick(NOW + 1)
    told(here)
    (log,) = logs(here)
    assert log["eventName"] == "headway.job.failed" and log["severityText"] == "ERROR"
    assert "exit code 1" in log["body"]["stringValue"] and "MemoryError: no memory left" in log["body"]["stringValue"]


def has_network():
    """Whether this machine has more than its loopback."""
    return any(not name.startswith("lo") for name in psutil.net_io_counters(pernic=True))


def test_the_host_is_measured_and_what_is_not_there_is_left_out(here, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    host = Host(here)
    found = {(point.instrument.name, *point.labels): point.value for point in (*host.look(), *host.look())}
    usage = shutil.disk_usage(here)
    assert abs(found["system.filesystem.usage", "free"] - usage.free) < 1e9
    assert 0 <= found["system.cpu.utilization",] <= 1 and found["system.cpu.logical.count",] == os.cpu_count()
    assert found["system.memory.usage", "used"] > 0
    assert (("system.network.io", "receive") in found) == has_network()
    assert not [name for name, *_ in found if name.startswith("hw.")]


def test_gpus_are_asked_through_nvidia_smi_without_waiting(here, tmp_path, monkeypatch):
    gpus(tmp_path, monkeypatch)
    host = Host(here)
    assert not [point for point in host.look() if point.instrument.name.startswith("hw.")]
    host._smi.wait(limit(10))
    found = {
        (point.instrument.name, point.labels[0]): point.value
        for point in host.look()
        if point.instrument.name.startswith("hw.")
    }
    assert found["hw.gpu.utilization", "0"] == 0.37 and found["hw.gpu.memory.usage", "1"] == 2048 * 2**20
    assert (
        ("hw.gpu.utilization", "1") not in found and ("hw.power", "1") not in found and found["hw.power", "0"] == 312.5
    )


def gpus(folder, monkeypatch, text=SMI):
    """A machine with two GPUs, as its driver's tool tells: it refuses a question that it does not know."""
    (folder / "smi").mkdir()
    program = folder / "smi" / "nvidia-smi"
    wanted = "--query-gpu=index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
    program.write_text(
        f"#!/bin/sh\n[ \"$1\" = '{wanted}' ] && [ \"$2\" = --format=csv,noheader,nounits ] || exit 6\nprintf '{text}'\n".replace(
            "\n'", "\\n'"
        )
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'smi'}{os.pathsep}{os.environ['PATH']}")


# ---- backends


@contextlib.contextmanager
def server(answer):
    """A server on loopback; `answer(path, headers, body)` returns status and body. Yields its address and what it accepted."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said = answer(self.path, self.headers, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            return None

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()


class Collector:
    """An OTLP/HTTP collector: takes protobuf of the right kind at the right path, and nothing else."""

    def __init__(self):
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.kinds = {
            "traces": ExportTraceServiceRequest,
            "logs": ExportLogsServiceRequest,
            "metrics": ExportMetricsServiceRequest,
        }
        self.away, self.spans, self.uids, self.points = False, [], [], {}

    def __call__(self, path, headers, body):
        kind = self.kinds.get(path.removeprefix("/v1/"))
        if self.away:
            return 503, b""
        if kind is None or headers["Content-Type"] != "application/x-protobuf":
            return 415, b""
        request = kind()
        request.ParseFromString(gzip.decompress(body) if headers["Content-Encoding"] == "gzip" else body)
        for resource in getattr(request, "resource_spans", []):
            self.spans += [span.span_id.hex() for scope in resource.scope_spans for span in scope.spans]
        for resource in getattr(request, "resource_logs", []):
            for record in (record for scope in resource.scope_logs for record in scope.log_records):
                self.uids += [one.value.string_value for one in record.attributes if one.key == "log.record.uid"]
        for resource in getattr(request, "resource_metrics", []):
            self.points |= {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
        return 200, b""


def test_a_collector_that_was_away_gets_everything_once(here):
    collector = Collector()
    folders.completed(here, "a")
    with server(collector) as url:
        made = Telemetry(here, settings(prometheus=False, otlp_endpoint=url))
        collector.away = True
        made.tick(time.time())
        folders.failed(here, "b")
        made.tick(time.time() + 1)
        assert not collector.uids and len(spans(here)) == 5
        collector.away = False
        made.tick(time.time() + 100)
        again = Telemetry(here, settings(prometheus=False, otlp_endpoint=url))
        again.tick(time.time() + 200)
        assert sorted(collector.uids) == events(here)
        assert sorted(collector.spans) == sorted(span["spanId"] for span in spans(here))
        runs = collector.points["headway.runs"].sum
        assert (
            runs.is_monotonic and runs.aggregation_temporality == 2 and {p.as_double for p in runs.data_points} == {1.0}
        )
        assert collector.points["headway.stage.duration"].histogram.data_points[0].count >= 1


def test_the_collector_of_these_tests_refuses_what_is_not_otlp():
    collector = Collector()
    assert collector("/v1/traces", {"Content-Type": "application/json"}, b"{}")[0] == 415
    assert collector("/v1/nothing", {"Content-Type": "application/x-protobuf"}, b"")[0] == 415


def test_a_backend_elsewhere_is_not_told_old_history(here):
    collector = Collector()
    folders.completed(here, "old")
    os.utime(here / "runs" / "old" / "events.jsonl", (NOW - 200_000, NOW - 200_000))
    folders.completed(here, "new")
    os.utime(here / "runs" / "new" / "events.jsonl", (NOW, NOW))
    with server(collector) as url:
        told(here, otlp_endpoint=url)
        assert {uid.split(":")[0] for uid in collector.uids} == {"new"}
    assert {log["attributes"]["headway.run"] for log in logs(here)} == {"old", "new"}


TYPES = {
    "Microsoft.ApplicationInsights.Request": "RequestData",
    "Microsoft.ApplicationInsights.RemoteDependency": "RemoteDependencyData",
    "Microsoft.ApplicationInsights.Message": "MessageData",
    "Microsoft.ApplicationInsights.Exception": "ExceptionData",
    "Microsoft.ApplicationInsights.Metric": "MetricData",
}


class Ingestion:
    """The HTTP edge of Application Insights: what its service checks before it takes a batch."""

    def __init__(self):
        self.away, self.taken, self.refused = False, [], []

    def __call__(self, path, headers, body):
        if self.away:
            return 503, b""
        try:
            items = json.loads(gzip.decompress(body) if headers["Content-Encoding"] == "gzip" else body)
            wrong = [item for item in items if not self.right(item)]
        except (OSError, ValueError, TypeError, AttributeError):
            items, wrong = [], [body]
        if not path.startswith("/v2.1/track") or headers["Content-Type"] != "application/json" or wrong:
            self.refused.append(wrong)
            return (
                400,
                b'{"itemsReceived": 1, "itemsAccepted": 0, "errors": [{"index": 0, "statusCode": 400, "message": "bad"}]}',
            )
        self.taken += items
        return 200, json.dumps({"itemsReceived": len(items), "itemsAccepted": len(items), "errors": []}).encode()

    def right(self, item):
        return (
            item["iKey"] == KEY
            and TYPES.get(item["name"]) == item["data"]["baseType"]
            and item["data"]["baseData"]["ver"] == 2
            and re.match(r"\d{4}-\d\d-\d\dT", item["time"])
            and item["tags"]["ai.cloud.role"] == "headway"
        )

    def of(self, kind):
        return [item["data"]["baseData"] for item in self.taken if item["data"]["baseType"] == kind]


@pytest.fixture
def ingestion(monkeypatch):
    made = Ingestion()
    with server(made) as url:
        monkeypatch.setenv("TEST_INSIGHTS", f"InstrumentationKey={KEY};IngestionEndpoint={url}/")
        yield made


def test_azure_monitor_gets_requests_dependencies_logs_and_what_was_added(here, ingestion):
    folders.completed(here, "a")
    folders.failed(here, "b")
    made = Telemetry(here, settings(prometheus=False, azure_connection_string="env:TEST_INSIGHTS"))
    now = time.time()
    made.tick(now)
    assert not ingestion.refused
    assert sorted((r["name"], r["success"]) for r in ingestion.of("RequestData")) == [
        ("retrain tiny", False),
        ("retrain tiny", True),
    ]
    assert [d["name"] for d in ingestion.of("RemoteDependencyData")].count("validate") == 2
    assert [e["exceptions"][0]["message"] for e in ingestion.of("ExceptionData")] == [
        "retrain of tiny: failed: the disk is full"
    ]
    uids = [
        log["properties"]["log.record.uid"] for log in (*ingestion.of("MessageData"), *ingestion.of("ExceptionData"))
    ]
    assert sorted(uids) == events(here)
    assert totals(ingestion, "completed") == [1]
    folders.completed(here, "c")
    made.tick(now + 1)
    restarted = Telemetry(here, settings(prometheus=False, azure_connection_string="env:TEST_INSIGHTS"))
    restarted.tick(now + 2)
    assert totals(ingestion, "completed") == [1, 1, 0] and len(ingestion.of("RequestData")) == 3


def test_azure_monitor_gets_the_audit_log_once_and_in_order(here, ingestion):
    with acting("anna"):
        audit(open_store(here), "delete", what="model/m@1", reason="old", before="1")
    audit(open_store(here), "authorise", outcome="refused", claimed="ben")
    told = settings(prometheus=False, azure_connection_string="env:TEST_INSIGHTS")
    Telemetry(here, told).tick(time.time())
    audit(open_store(here), "move_ref", what="refs/m/champion")
    Telemetry(here, told).tick(time.time() + 1)
    found = [log for log in ingestion.of("MessageData") if log["properties"]["log.record.uid"].startswith("audit:")]
    assert [log["properties"]["headway.audit.number"] for log in found] == ["1", "2", "3"]
    first, refused, _ = found
    assert first["message"] == "anna: delete model/m@1 (done)" and first["severityLevel"] == 1
    assert (refused["severityLevel"], refused["properties"]["headway.audit.claimed"]) == (2, "ben")
    assert first["properties"]["headway.audit.hash"] and first["properties"]["headway.audit.reason"] == "old"


def totals(ingestion, status):
    found = [m for m in ingestion.of("MetricData") if m["metrics"][0]["name"] == "headway.runs"]
    return [m["metrics"][0]["value"] for m in found if m["properties"]["status"] == status]


def test_azure_monitor_that_was_away_gets_everything_once(here, ingestion):
    folders.completed(here, "a")
    made = Telemetry(here, settings(prometheus=False, azure_connection_string="env:TEST_INSIGHTS"))
    ingestion.away = True
    made.tick(time.time())
    assert not ingestion.taken and list((here / "telemetry" / "azure").rglob("*.blob*"))
    ingestion.away = False
    folders.completed(here, "b")

    def arrived():
        made.tick(time.time() + 1000)
        folders.completed(here, f"c{time.monotonic()}")  # each new delivery takes along what was kept
        return {r["properties"]["headway.run"] for r in ingestion.of("RequestData")} >= {"a", "b"}

    until(arrived, 40)
    told_runs = [r["properties"]["headway.run"] for r in ingestion.of("RequestData")]
    assert len(told_runs) == len(set(told_runs))


def test_the_ingestion_of_these_tests_refuses_what_is_wrong(ingestion):
    good = {"iKey": KEY, "name": "Microsoft.ApplicationInsights.Message", "time": "2026-01-01T00:00:00Z"}
    good |= {"tags": {"ai.cloud.role": "headway"}, "data": {"baseType": "MessageData", "baseData": {"ver": 2}}}
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    def status(item, path="/v2.1/track", headers=headers):
        return ingestion(path, headers, gzip.compress(json.dumps([item]).encode()))[0]

    assert status(good) == 200
    assert (
        status({**good, "iKey": "another"})
        == status({**good, "name": "Microsoft.Else"})
        == status(good, "/v2/track")
        == 400
    )
    assert (
        status({**good, "data": {"baseType": "MetricData"}})
        == status(good, headers={**headers, "Content-Type": "text/plain"})
        == 400
    )
    assert ingestion("/v2.1/track", headers, b"not gzip")[0] == 400


def test_azures_own_telemetry_is_off(here, ingestion):
    from azure.monitor.opentelemetry.exporter._configuration._state import get_configuration_manager
    from azure.monitor.opentelemetry.exporter.statsbeat._state import is_statsbeat_enabled

    folders.completed(here, "a")
    told(here, azure_connection_string="env:TEST_INSIGHTS")
    assert not is_statsbeat_enabled() and get_configuration_manager() is None
    assert not [m for m in ingestion.of("MetricData") if m["metrics"][0]["name"].startswith("_")]


def test_a_connection_string_is_not_written_into_settings_and_a_missing_one_stops_nothing(here, caplog):
    with pytest.raises(ValueError, match="env:NAME"):
        settings(azure_connection_string=f"InstrumentationKey={KEY}")
    folders.completed(here, "a")
    told(here, azure_connection_string="env:NOT_THERE")
    assert "NOT_THERE is not set" in caplog.text and len(spans(here)) == 3


# ---- secrets


def test_a_planted_secret_is_in_nothing_that_is_told(here, monkeypatch, ingestion):
    secret = "c4n4ry-0123456789abcdef"
    monkeypatch.setenv("PLANTED_SECRET", secret)
    run = folders.Run(here, "a", subject="tiny").stage("validate", why=secret, metrics={"rows": 1.0})
    run.progress("validate", 1, 2, f"reads {secret}")
    run.close("failed", RuntimeError(f"https://user:{secret}@host/ refused AccountKey={secret}"), "train")
    with open(here / "runs" / "a" / "events.jsonl", "a") as file:  # as if it was written before anybody redacted
        file.write(json.dumps({"event": "waiting", "time": 1.0, "for": secret}) + "\n")
    folder = folders.job(here, "train-abc", f"print('{secret}'); sys.exit(1)")
    until(lambda: process.read_json(folder / "exit.json"))
    made = told(here, prometheus=True, azure_connection_string="env:TEST_INSIGHTS")
    text = scraped(made) + json.dumps(ingestion.taken)
    text += "".join(
        path.read_bytes().decode(errors="replace") for path in (here / "telemetry").rglob("*") if path.is_file()
    )
    assert secret not in text and text.count("[redacted]") >= 4


# ---- dashboard and rules as code


@pytest.fixture
def everything(here, tmp_path, monkeypatch):
    """A scrape of a home in which everything is to be seen that can be."""
    gpus(tmp_path, monkeypatch)
    folders.completed(here, "a")
    folders.failed(here, "b")
    folders.gate_closed(here, "c")
    run = folders.Run(here, "d")
    run.log.started("train", None)
    run.progress("train", 1, 2, "loss 2")
    folder = folders.job(
        here,
        "train-abc",
        "time.sleep(0.1)\nif not (folder / 'again').exists(): (folder / 'again').touch(); sys.exit(1)\ntime.sleep(600)",
        restarts=2,
    )
    folders.metrics(folder, step=1, loss=2.0, tokens_per_second=10.0)
    until(lambda: (process.read_json(folder / "attempts.json") or {}).get("attempts") == 2)
    measured(here, "evaluation", "tiny", {"accuracy": 0.5}, at=NOW)
    measured(here, "drift", "tiny", {"domain_auc": 0.9}, at=NOW)
    firing = [{"alert": rule.name, "severity": rule.severity, "instance": "x"} for rule in RULES]
    process.write_json(here / "platform" / "alerts.json", {"firing": firing, "outbox": []})
    made = told(here, prometheus=True)
    made._host._smi.wait(limit(10))
    made.tick(NOW + 1)
    yield made
    process.stop(folder)


def test_every_metric_of_the_dashboard_and_the_rules_is_scraped(everything):
    there = {name for name, *_ in figures(everything)} | (set() if has_network() else {of.NETWORK.prometheus})
    rules = yaml.safe_load((ROOT / "docs" / "monitoring" / "headway-alerts.yaml").read_text())["groups"][0]["rules"]
    for query in [*queries(), *(rule["expr"] for rule in rules)]:
        named = set(re.findall(r"\b(?:headway|system|hw)_\w+", query))
        assert named and named <= there, query
    assert {of.STAGES.prometheus + "_bucket", *(i.prometheus for i in of.ALL if i is not of.STAGES)} <= there
    words = [re.search(r'alert="(\w+)"', rule["expr"]) for rule in rules]
    assert {word[1] for word in words if word} <= {rule.name for rule in RULES}


def test_the_files_of_the_documentation_are_what_the_code_says():
    made = runpy.run_path(str(ROOT / "docs" / "make_monitoring.py"))
    for name, text in made["rendered"]().items():
        assert (made["FOLDER"] / name).read_text() == text, "run: python docs/make_monitoring.py"
    assert {path.name for path in made["FOLDER"].iterdir()} == set(made["rendered"]())


def test_the_page_tells_every_metric_and_every_alert():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    told_metrics = {row.split("`")[1]: row for row in page.splitlines() if re.match(r"\| `(headway|system|hw)_", row)}
    assert told_metrics == {
        i.prometheus: f"| `{i.prometheus}` | {i.kind} | {', '.join(i.labels) or 'none'} | {i.help} |" for i in of.ALL
    }
    rows = [f"| [`{rule.name}`](runbooks.md#{rule.name}) | {rule.severity} | {rule.when} |" for rule in RULES]
    assert [row for row in rows if row not in page] == [] and page.count("| critical |") + page.count(
        "| warning |"
    ) == len(rows)


def test_the_dashboard_is_one_that_grafana_can_lay_out():
    made = dashboard()
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == sum(len(row) + 1 for row in ROWS.values())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in (panel for panel in panels if panel["type"] != "row"):
        assert panel["type"] in ("timeseries", "table", "bargauge") and panel["description"] and panel["targets"]
        labels = set(re.findall(r"{{(\w+)}}", "".join(target["legendFormat"] for target in panel["targets"])))
        known = {
            label for i in of.ALL if i.prometheus in "".join(t["expr"] for t in panel["targets"]) for label in i.labels
        }
        assert labels <= known, panel["title"]


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@promtool
def test_prometheus_takes_the_rules_and_every_query_of_the_dashboard(tmp_path):
    recorded = [{"record": f"q:{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    for path in (ROOT / "docs" / "monitoring" / "headway-alerts.yaml", tmp_path / "queries.yaml"):
        ran = subprocess.run(
            ["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=limit(60)
        )
        assert ran.returncode == 0, ran.stderr + ran.stdout


WATCHED = {"headway_telemetry_time_seconds": "0+60x60"}
FAULTS = {
    "run_failed": {'headway_run_failing_time_seconds{flow="retrain",subject="tiny",status="failed"}': "0x10 _x20"},
    "gate_closed": {
        'headway_run_failing_time_seconds{flow="retrain",subject="tiny",status="gate_closed"}': "0x10 _x20"
    },
    "flow_run_died": {'headway_run_failing_time_seconds{flow="retrain",subject="tiny",status="died"}': "0x10 _x20"},
    "job_without_progress": {
        'headway_stage_progress_time_seconds{flow="retrain",subject="tiny",stage="train"}': "-900x10 1200x20"
    },
    "schedule_missed": {
        'headway_alert_firing{alert="schedule_missed",instance="retrain/local",severity="warning"}': "1x10 _x20"
    },
    "disk_nearly_full": {'system_filesystem_usage_bytes{state="free"}': "4e9x10 9e9x20"},
    "champion_not_revalidated": {
        'headway_alert_firing{alert="champion_not_revalidated",instance="tiny",severity="warning"}': "1x10 _x20"
    },
    "model_degraded": {'headway_alert_firing{alert="model_degraded",instance="tiny",severity="warning"}': "1x10 _x20"},
    "endpoint_anomaly": {
        'headway_alert_firing{alert="endpoint_anomaly",instance="tiny",severity="warning"}': "1x10 _x20"
    },
    "model_tampered": {
        'headway_alert_firing{alert="model_tampered",instance="model/tiny@1",severity="critical"}': "1x10 _x20"
    },
    "endpoint_untrusted": {
        'headway_alert_firing{alert="endpoint_untrusted",instance="tiny",severity="critical"}': "1x10 _x20"
    },
    "platform_part_down": {
        'headway_alert_firing{alert="platform_part_down",instance="worker",severity="critical"}': "1x10 _x20"
    },
    "event_source_broken": {
        'headway_alert_firing{alert="event_source_broken",instance="folder /inbox",severity="warning"}': "1x10 _x20"
    },
    **{
        name: {f'headway_alert_firing{{alert="{name}",instance="anna",severity="warning"}}': "1x10 _x20"}
        for name in ("many_denials", "bulk_download", "new_place")
    },
    "watch_silent": {"headway_telemetry_time_seconds": "0x10 1200+60x20"},
}
"""A series a minute for each rule: ten minutes in which it must fire, then twenty in which it must not."""


@promtool
def test_every_rule_fires_and_clears_in_prometheus(tmp_path):
    rules = ROOT / "docs" / "monitoring" / "headway-alerts.yaml"
    text = {rule["alert"]: rule for rule in yaml.safe_load(rules.read_text())["groups"][0]["rules"]}
    assert {camel(name) for name in FAULTS} == set(text)
    tests = [_case(name, series, text[camel(name)]) for name, series in FAULTS.items()]
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})
    )
    ran = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, timeout=limit(60)
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tests[0]["alert_rule_test"][0]["exp_alerts"] = []
    (tmp_path / "wrong.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})
    )
    assert subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "wrong.yaml")], capture_output=True, timeout=limit(60)
    ).returncode


def _case(name, series, rule):
    given = WATCHED | series
    ((named, _),) = series.items()
    labels = dict(re.findall(r'(\w+)="([^"]*)"', named))
    fired = {
        "exp_labels": {**labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "description": said(labels)},
    }
    at = [("8m", [fired]), ("25m", [])]
    return {
        "interval": "1m",
        "input_series": [{"series": one, "values": text} for one, text in given.items()],
        "alert_rule_test": [{"eval_time": when, "alertname": camel(name), "exp_alerts": wanted} for when, wanted in at],
    }


def said(labels):
    return "".join(f"{name}={labels[name]} " for name in sorted(labels))


# ---- the real thing


def test_a_real_lifecycle_is_told(home, done, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(home.path))
    made = Telemetry(home.path, settings())
    made.tick(time.time())
    stages = [
        s["name"] for s in spans(home.path) if s["attributes"]["headway.subject"] == "tiny" and "parentSpanId" in s
    ]
    assert set(stages) >= {"validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export", "deploy"}
    assert figures(made)["headway_runs_total", "retrain", "tiny", "completed"] >= 1
    assert figures(made)["headway_stage_duration_seconds_count", "retrain", "train", "ran"] >= 1
    assert not [key for key in figures(made) if key[0] == "headway_training_loss"]
