"""The champion against new data: each verdict with its evidence, what it says to others, and that nothing else changes."""

import json
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from caused import make_batch

from tasks.registry.revalidations import champions, degraded_in_a_row, last_revalidated, learnt_from
from tasks.storage import open_store

STAGES = ("integrity", "validate", "drift", "preprocess", "evaluate", "verdict")
PARTS = ("integrity", "data", "drift", "performance", "service")
DRIFT = ("--set", "revalidation.drift.min_documents=20")
CAUSED = Path(__file__).parents[2] / "support" / "caused.py"


@pytest.fixture
def champion(home, done):
    """What the champion's ref says; it must say the same afterwards."""
    with same_refs(home) as refs:
        yield refs["tiny/champion.json"]


@contextmanager
def same_refs(home):
    """What each ref says, by its file."""
    folder = home.path / "store" / "documents" / "refs"
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    yield {path.relative_to(folder).as_posix(): json.loads(data) for path, data in before.items()}
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before


def revalidated(home):
    return last_revalidated(open_store(home.path), "tiny")


def parts(ran):
    return {part["name"]: part["status"] for part in ran.said["revalidation"]["parts"]}


def events(home, name):
    """What was taken in under a name, oldest first: object and data."""
    path = home.path / "events" / "events.db"
    if not path.exists():
        return []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        query = "SELECT object, data FROM events WHERE name = ? AND status = 'accepted' ORDER BY number"
        return [(what, json.loads(data)) for what, data in database.execute(query, (name,))]


def told(ran):
    """revalidation.json, and the folder that it lies in."""
    folder = Path(ran.said["revalidation"]["evidence"]).parent
    return json.loads((folder / "revalidation.json").read_text()), folder


def publish_numbers(home, name, seed):
    """Documents of digits: another language than the champion's."""
    draw = random.Random(seed)
    texts = [" ".join(str(draw.randrange(10**7)) for _ in range(draw.randrange(20, 50))) for _ in range(150)]
    path = home.path.parent / f"{name}-{seed}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return home.ok("dataset", "publish", name, path).said["ref"]


@pytest.fixture(scope="module")
def sound(home, done):
    """A revalidation of the champion as it is, when it began, and when the one before ended."""
    before, noted = time.time(), revalidated(home)
    with same_refs(home):
        return home.ok("revalidate", "-c", "tiny"), before, noted


def test_a_sound_champion_is_valid_and_that_is_noted(home, champion, sound):
    assert champions(open_store(home.path)) == ["tiny"]
    ran, before, noted = sound
    assert noted <= before
    reused = dict.fromkeys(("validate", "preprocess", "evaluate"), "reused")
    assert ran.statuses() == {"integrity": "ran", **reused, "drift": "not_run", "verdict": "ran"}
    assert tuple(ran.statuses()) == STAGES
    found = ran.said["revalidation"]
    assert (found["verdict"], found["passed"], found["champion"]) == ("valid", True, champion["target"])
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_byte_at_promotion"])
    assert tuple(parts(ran)) == PARTS and set(parts(ran).values()) <= {"passed", "absent", "insufficient"}
    assert {parts(ran)[name] for name in ("integrity", "data", "drift", "performance")} == {"passed"}
    assert before < revalidated(home) <= time.time()
    page = Path(ran.said["report"]).read_text()
    assert "revalidate" in page and "<svg" in page
    for word in ("verdict", "integrity", "performance", "Evidence: ", "valid"):
        assert word in ran.stderr


def test_the_evidence_says_what_it_rests_on_and_mlflow_and_lineage_have_it(home, champion, sound):
    ran, *_ = sound
    evidence, folder = told(ran)
    assert (evidence["schema"], evidence["model"]) == ("headway/revalidation/1", champion["target"])
    assert evidence["reference"] == learnt_from(open_store(home.path), champion["target"])
    performance = evidence["performance"]
    assert performance["loss"] == {"estimate": 0.0, "low": 0.0, "high": 0.0}
    assert performance["paired"] == performance["new"]["documents"] == performance["promotion"]["documents"]
    assert performance["scored_by"].startswith("checkpoint/tiny@")
    assert "valid" in (folder / "evidence.html").read_text()
    nodes = home.ok("lineage", ran.said["revalidation"]["ref"]).said["nodes"]
    assert {"model", "dataset", "evaluation", "checkpoint", "tokens"} <= {node["kind"] for node in nodes}
    assert ran.said["revalidation"]["ref"] in [about for about, _ in events(home, "model.revalidated")]
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        run = ran.said["mlflow_run"]["id"]
        tags = dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)).fetchall())
        metrics = dict(database.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run,)).fetchall())
    assert tags["headway.verdict"] == "valid"
    assert metrics["loss_since_promotion"] == 0.0 and metrics["bits_per_byte"] > 0
    assert list((home.path / "mlflow").rglob(f"{run}/artifacts/evidence.html"))


@pytest.mark.long
def test_a_model_is_measured_with_the_settings_that_it_was_made_with(home, done, champion):
    """The same as -c tiny, of which the champion was made; a setting may be changed, and other data named."""
    named, configured = home.run("revalidate", "tiny"), home.run("revalidate", "-c", "tiny")
    assert named.code == configured.code == 0
    assert named.said["config_digest"] == configured.said["config_digest"]
    assert named.said["dataset"] == configured.said["dataset"] == done.said["dataset"]
    changed = home.run("revalidate", "tiny", "--data", done.said["dataset"], "--set", "revalidation.windows=3")
    assert changed.said["config_digest"] != named.said["config_digest"]
    assert changed.said["revalidation"]["window"] == {"number": 0, "of": 3, "data": []}


@pytest.mark.long
def test_another_language_is_degraded_and_only_the_second_window_says_so(home, done, champion):
    noted, first, known = revalidated(home), publish_numbers(home, "numbers", 1), len(events(home, "model.degraded"))
    ran = home.run("revalidate", "-c", "tiny", "--data", "numbers", *DRIFT)
    assert ran.code == 3 and ran.said["status"] == "gate_closed", ran.stderr
    assert ran.statuses() == {**dict.fromkeys(STAGES, "ran"), "verdict": "gate_closed"}
    found = ran.said["revalidation"]
    assert found["verdict"] == "degraded" and not found["passed"]
    assert found["window"] == {"number": 1, "of": 2, "data": [first]} and not found["acts"]
    assert (parts(ran)["drift"], parts(ran)["performance"]) == ("failed", "failed")
    names = [check["name"] for check in ran.said["error"]["checks"]]
    assert "loss since promotion, relative" in names and "drift, smallest corrected p value" in names
    assert ran.said["error"]["stage"] == "verdict" and ran.said["error"]["remedy"]
    evidence, folder = told(ran)
    assert evidence["drift"]["verdict"] == "drift" and (folder / "drift.png").stat().st_size > 1000
    assert {each["slice"] for each in evidence["performance"]["slices"]} >= {"script digits", "script latin"}
    assert revalidated(home) == noted and events(home, "model.degraded")[known:] == []

    again = home.run("revalidate", "-c", "tiny", "--data", "numbers", *DRIFT)
    assert again.said["revalidation"]["window"]["number"] == 1 and events(home, "model.degraded")[known:] == []

    second = publish_numbers(home, "numbers", 2)
    ran = home.run("revalidate", "-c", "tiny", "--data", "numbers", *DRIFT)
    assert ran.code == 3 and ran.said["revalidation"]["acts"]
    assert ran.said["revalidation"]["window"] == {"number": 2, "of": 2, "data": [first, second]}
    [(about, data)] = events(home, "model.degraded")[known:]
    assert about == ran.said["revalidation"]["ref"] and data["dataset"] == second

    home.run("revalidate", "-c", "tiny", "--data", second, *DRIFT)
    assert len(events(home, "model.degraded")) == known + 1
    store = open_store(home.path)
    assert degraded_in_a_row(store, champion["target"]) == (first, second)
    assert home.run("revalidate", "tiny").said["revalidation"]["window"]["number"] == 0
    assert degraded_in_a_row(store, champion["target"]) == ()


@pytest.mark.long
def test_data_that_is_no_measure_or_too_little_is_unknown(home, done, champion):
    path = home.path.parent / "little.jsonl"
    path.write_text("".join(json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n" * 3}) + "\n" for n in range(6)))
    home.ok("dataset", "publish", "little", path)
    noted = revalidated(home)
    ran = home.run("revalidate", "-c", "tiny", "--data", "little", "--set", "evaluation.min_documents=5")
    assert ran.code == 3, ran.stderr
    assert ran.said["revalidation"]["verdict"] == "unknown" and parts(ran)["performance"] == "insufficient"
    assert ran.statuses()["evaluate"] == "not_run" and ran.said["revalidation"]["evaluation"] is None
    assert "evaluation.min_documents = 5" in ran.said["error"]["message"]
    ran = home.run("revalidate", "-c", "tiny", "--data", "little", "--set", "validation.min_documents=50")
    assert ran.code == 3 and ran.said["error"]["stage"] == "validate", ran.stderr
    assert ran.said["revalidation"]["verdict"] == "unknown"
    assert (parts(ran)["data"], parts(ran)["performance"]) == ("failed", "absent")
    assert "no measure" in told(ran)[0]["why"][0]
    assert revalidated(home) == noted


def test_changed_files_are_invalid_and_serve_no_more_until_they_are_mended(home, done, champion):
    assert home.ok("endpoint", "list").said["endpoints"][0]["ready"] or home.retrain().code == 0
    file = home.folder_of(champion["target"]) / "files" / "genai_config.json"
    sound = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(sound.replace(b"0", b"1", 1))
    try:
        before = len(events(home, "model.tampered"))
        ran = home.run("revalidate", "tiny")
        assert ran.code == 5 and "genai_config.json" in ran.said["error"]["message"], ran.stderr
        assert ran.said["error"]["remedy"]
        assert ran.said["revalidation"]["verdict"] == "invalid"
        assert parts(ran)["integrity"] == "failed" and parts(ran)["performance"] == "absent"
        ended = {**dict.fromkeys(STAGES, "not_run"), "integrity": "ran", "verdict": "gate_closed"}
        assert ran.statuses() == ended
        assert "genai_config.json" in told(ran)[1].joinpath("evidence.html").read_text()
        assert len(events(home, "model.tampered")) == before + 1
        stopped = home.ok("audit-log").said["entries"]
        assert any(entry["action"] == "stop endpoint" and entry["what"] == "endpoint/tiny" for entry in stopped)
        assert home.ok("endpoint", "list").said["endpoints"][0]["url"] is None
        home.run("revalidate", "tiny")
        assert len(events(home, "model.tampered")) == before + 1
        refused = home.retrain()
        assert refused.code == 5 and "genai_config.json" in refused.said["error"]["message"]
        assert home.ok("endpoint", "list").said["endpoints"][0]["url"] is None
    finally:
        file.write_bytes(sound)
    ran = home.retrain()
    assert ran.code == 0 and ran.statuses()["deploy"] == "ran", ran.stderr
    assert home.ok("endpoint", "list").said["endpoints"][0]["ready"]
    assert home.run("revalidate", "tiny").said["revalidation"]["verdict"] == "valid"


@pytest.mark.long
def test_a_manifest_that_is_gone_is_invalid_too(home, done, champion):
    manifest = home.folder_of(champion["target"]) / "manifest.json"
    aside = manifest.with_suffix(".aside")
    manifest.rename(aside)
    try:
        ran = home.run("revalidate", "-c", "tiny")
        assert ran.code == 5 and ran.said["revalidation"]["verdict"] == "invalid", ran.stderr
    finally:
        aside.rename(manifest)
    assert home.retrain().code == 0


def caused(home, **arguments):
    """A run that events asked for, to its end: its final state."""
    told_ = {"flow": "revalidate", "dataset": "tiny", "set": [], **arguments}
    ran = subprocess.run(
        [sys.executable, "-P", str(CAUSED), json.dumps(told_)], env=home.environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.long
def test_events_have_one_run_and_a_second_one_names_it_and_does_nothing(home, done, champion):
    cause = make_batch(home.path, "dataset.published", "dataset/tiny", dataset="dataset/tiny")
    noted = revalidated(home)
    assert caused(home, cause=cause)["type"] == "COMPLETED"
    first = revalidated(home)
    assert first > noted
    second = caused(home, cause=cause)
    assert second["type"] == "COMPLETED" and "covers the same events" in second["message"]
    assert revalidated(home) == first
    unknown = caused(home, cause="events-none")
    assert unknown["type"] == "FAILED" and "events-none" in unknown["message"]


def test_a_model_without_a_champion_and_a_dataset_that_is_not_there_are_named(home, done, champion):
    ran = home.run("revalidate", "-c", "tiny", "--set", "training.model=none")
    assert ran.code == 2 and "none has no champion" in ran.said["error"]["message"]
    ran = home.run("revalidate", "nobody")
    assert ran.code == 2 and "nobody has no champion" in ran.said["error"]["message"]
    assert "tiny" in ran.said["error"]["remedy"]
    ran = home.run("revalidate", "-c", "tiny", "--data", "no-such")
    assert ran.code == 2 and "no-such" in ran.said["error"]["message"]
