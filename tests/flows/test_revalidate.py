"""The champion against new data: what is measured, what closes the gate, what is noted, and that nothing served moves."""

import json
import time
from pathlib import Path

import pytest

from tasks.registry.revalidations import champions, last_revalidated
from tasks.storage import open_store

STAGES = ("validate", "preprocess", "evaluate")


@pytest.fixture
def champion(home, done):
    """What the champion's ref says; it must say the same afterwards."""
    refs = {path: path.read_bytes() for path in (home.path / "store" / "documents" / "refs").rglob("*.json")}
    assert len(refs) == 1
    yield json.loads(next(iter(refs.values())))
    now = {path: path.read_bytes() for path in (home.path / "store" / "documents" / "refs").rglob("*.json")}
    assert now == refs


def revalidated(home):
    return last_revalidated(open_store(home.path), "tiny")


def test_a_sound_champion_passes_and_that_is_noted(home, done, champion):
    assert champions(open_store(home.path)) == ["tiny"]
    before = time.time()
    assert revalidated(home) <= before
    ran = home.run("revalidate", "-c", "tiny")
    assert ran.code == 0, ran.stderr
    assert ran.statuses() == dict.fromkeys(STAGES, "reused")
    told = ran.said["revalidation"]
    assert told["passed"] and told["champion"] == champion["target"]
    assert told["bits_per_byte"] == pytest.approx(told["bits_per_byte_at_promotion"])
    assert before < revalidated(home) <= time.time()
    page = Path(ran.said["report"]).read_text()
    assert "revalidate" in page and "<svg" in page


def test_new_data_that_is_another_language_closes_the_gate(home, done, champion):
    noted = revalidated(home)
    lines = [f"{number * 7919 % 10007} " * 40 for number in range(400)]
    path = home.path.parent / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number}: {line}"}) + "\n" for number, line in enumerate(lines)))
    home.ok("dataset", "publish", "numbers", path)
    ran = home.run("revalidate", "-c", "tiny", "--dataset", "numbers", "--set", "comparison.min_gain_over_bigram=-1.0")
    assert ran.code == 3 and ran.said["status"] == "gate_closed", ran.stderr
    assert ran.statuses() == {"validate": "ran", "preprocess": "ran", "evaluate": "gate_closed"}
    names = [check["name"] for check in ran.said["error"]["checks"]]
    assert "loss since promotion, relative" in names or "gain over the Kneser-Ney bigram" in names
    assert not ran.said["revalidation"]["passed"]
    assert revalidated(home) == noted


def test_a_damaged_champion_is_named_before_anything_is_measured(home, done, champion):
    file = home.folder_of(champion["target"]) / "files" / "genai_config.json"
    sound = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(sound.replace(b"0", b"1", 1))
    try:
        ran = home.run("revalidate", "-c", "tiny")
        assert ran.code == 5 and "genai_config.json" in ran.said["error"]["message"], ran.stderr
        assert ran.said["error"]["remedy"] and set(ran.statuses().values()) == {"not_run"}
    finally:
        file.write_bytes(sound)


def test_a_model_without_a_champion_and_a_dataset_that_is_not_there_are_named(home, done, champion):
    ran = home.run("revalidate", "-c", "tiny", "--set", "training.model=none")
    assert ran.code == 2 and "none has no champion" in ran.said["error"]["message"]
    ran = home.run("revalidate", "-c", "tiny", "--dataset", "no-such")
    assert ran.code == 2 and "no-such" in ran.said["error"]["message"]
