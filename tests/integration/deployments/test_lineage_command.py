"""`headway lineage`, both ways, as a user types it: words, JSON, a page, events."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support import Home
from waiting import limit

from tasks.common.process import write_json
from tasks.config.environment import environment, installed, sku, surroundings
from tasks.report.data import Edge, Lineage, Node
from tasks.report.lineage import BOXES, condensed, lineage_graph
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

RUN = {"flow": "retrain", "flow_run": "0b6ad0d4-2e16-4f0f-9a4e-7f4f1e1b0001", "commit": "c" * 40, "dirty": True}
CONFIG = {"config": {"training": {"steps": 3, "note": "<b>bold</b>"}}, "config_digest": "d" * 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose endpoint serves a model of a dataset; with the references of all, by kind."""
    made = Home(tmp_path_factory.mktemp("lineage") / "home")
    store, refs = open_store(made.path), {}
    steps = {
        "dataset": (),
        "tokens": ("dataset",),
        "checkpoint": ("tokens",),
        "evaluation": ("checkpoint",),
        "model": ("checkpoint",),
    }
    for number, (kind, inputs) in enumerate(steps.items()):
        folder = made.path / "made" / kind
        folder.mkdir(parents=True)
        (folder / "data").write_text(kind)
        said = Provenance(
            name="tiny", inputs=tuple(refs[each] for each in inputs), stage=f"make-{kind}", who="ada", host="here",
            created=f"2026-11-21T1{number}:00:00+00:00", **RUN, **(CONFIG if inputs else {}),
        )  # fmt: skip
        refs[kind] = store.publish(folder, kind=kind, inputs=(), provenance=said).ref
    write_json(made.path / "endpoints" / "live" / "endpoint.json", {"model_ref": refs["model"]})
    return made, refs


def words(home, *said):
    process = home.start("lineage", *said)
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    return out


def test_the_answer_after_a_poisoning_comes_first(home):
    made, refs = home
    said = words(made, refs["dataset"][:24], "--forward").splitlines()
    assert said[0] == f"1 endpoint(s) and 1 model(s) stand on {refs['dataset']}:"
    assert re.fullmatch(rf"  endpoint/live +made from it  serves {refs['model'][:23]}", said[1])
    assert re.fullmatch(rf"  {refs['model'][:23]} +made from it  2026-11-21T14:00:00\+00:00", said[2])
    assert said[4].startswith(refs["dataset"][:25]) and said[5].startswith(
        f"  {refs['tokens'][:24]}  commit cccccccccc (changed)"
    )
    assert words(made, "endpoint/live", "--forward").startswith("No model and no endpoint stands on endpoint/live.")


def test_json_both_ways(home):
    made, refs = home
    up = made.ok("lineage", refs["dataset"], "--forward").said
    assert (up["direction"], up["root"], up["damaged"]) == ("up", refs["dataset"], [])
    assert up["models"] == [{"ref": refs["model"], "created": "2026-11-21T14:00:00+00:00", "through": "data"}]
    assert [each["ref"] for each in up["endpoints"]] == ["endpoint/live"]
    assert {node["ref"] for node in up["nodes"]} == {*refs.values(), "endpoint/live"}
    assert up["configurations"] == {"d" * 64: CONFIG["config"]} and {node["config"] for node in up["nodes"]} == {None}
    down = made.ok("lineage", "endpoint/live").said
    assert down["nodes"][1]["config"] == CONFIG["config"]
    assert {node["kind"] for node in down["nodes"]} == {"endpoint", "model", "checkpoint", "tokens", "dataset"}
    assert "models" not in down and (made.path / "index" / "lineage.db").is_file()


def test_the_page_stands_alone_and_holds_what_was_found(home, tmp_path):
    made, refs = home
    page = tmp_path / "sub" / "lineage.html"
    assert made.ok("lineage", refs["dataset"], "--forward", "--html", page).said["html"] == str(page)
    text = page.read_text()
    shown = [f"{refs[kind][:-56]}" for kind in refs]
    assert [ref for ref in shown if ref not in text] == []
    assert (
        "endpoint/live" in text and "cccccccccccc" in text and "dddddddddddd" in text and "2026-11-21 14:00 UTC" in text
    )
    assert "&lt;b&gt;bold&lt;/b&gt;" in text and "<b>bold" not in text
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|<link[^>]+href=\"(?!data:)", text)
    assert "prefers-color-scheme: dark" in text and "max-width: 680px" in text


def test_events_go_to_a_file_and_to_a_server_and_its_absence_has_a_remedy(home, tmp_path):
    made, _ = home
    bodies = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Taking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    file = tmp_path / "events.jsonl"
    assert made.ok("lineage", "endpoint/live", "--openlineage", file).said["events"] == 8
    assert made.ok("lineage", "endpoint/live", "--openlineage", url).said["events"] == 8
    server.shutdown()
    server.server_close()
    assert bodies == [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["job"]["name"] for each in bodies[::2]] == [
        f"make-{k}/tiny" for k in ("dataset", "tokens", "checkpoint", "model")
    ]
    away = made.run("lineage", "endpoint/live", "--openlineage", url)
    assert away.code == 6 and url in away.said["error"]["message"] and "runs" in away.said["error"]["remedy"]


def test_what_cannot_be_answered(home):
    made, _ = home
    assert made.run("lineage", "dataset/none", "--forward").code == 2
    assert made.run("lineage", "endpoint/none").code == 2
    assert made.run("lineage", "model/tiny", "--openlineage", "kafka://here").code == 2


def node(kind, name, number):
    return Node(
        ref=f"{kind}/{name}@{number:064x}",
        kind=kind,
        name=name,
        version=f"{number:064x}",
        created=f"20{number:02d}-01-01",
    )


def test_a_large_lineage_is_drawn_with_versions_in_one_box():
    many = [node("model", f"m{n % 3}", n) for n in range(60)]
    root = node("dataset", "raw", 99)
    edges = tuple(Edge(input=root.ref, output=each.ref) for each in many)
    drawn = condensed(Lineage(nodes=(root, *many), edges=edges))
    assert [(each.name, each.count) for each in drawn.nodes] == [("raw", 1), ("m0", 20), ("m1", 20), ("m2", 20)]
    assert len(drawn.edges) == 3 and drawn.nodes[0].version
    svg = lineage_graph(Lineage(nodes=(root, *many), edges=edges))
    assert "20 versions" in svg and "61 nodes in 4 boxes" in svg
    names = [node("model", f"m{n}", n) for n in range(60)]
    edges = (*(Edge(input=root.ref, output=each.ref) for each in names), Edge(input=names[0].ref, output=names[1].ref))
    drawn = condensed(Lineage(nodes=(root, *names), edges=edges))
    assert [(each.name, each.count) for each in drawn.nodes] == [("raw", 1), ("60 names", 60)]
    assert lineage_graph(Lineage(nodes=(root, *names), edges=edges)).count('<rect class="box"') == 2
    few = Lineage(nodes=(root, *many[: BOXES - 1]), edges=())
    assert condensed(few) == few


def test_the_software_and_the_machine_are_told(home, tmp_path):
    assert surroundings() == {"host": surroundings()["host"], "sku": sku(), "environment": environment()}
    assert "pytest==" in " ".join(installed()) and installed() == sorted(set(installed()))
    assert re.fullmatch(r"packages:[0-9a-f]{64}", environment()) and re.match(r"\d+ x \S", sku())
    code = "from tasks.config.environment import *; print(environment(), sku())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**home[0].environment(), "HEADWAY_IMAGE_DIGEST": "sha256:abc", "HEADWAY_SKU": "Standard_ND96isr_H100_v5"},
    )  # fmt: skip
    assert said.stdout.split() == ["sha256:abc", "Standard_ND96isr_H100_v5"]
