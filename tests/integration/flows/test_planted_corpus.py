"""`headway validate` on a corpus with every plant that it must find, and on a clean one; the quarantine and what is left."""

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import STDLIB, Ran

from tasks.signing.keys import ensure_key, public_key_of

TINY = ("-c", "tiny")
RUSSIAN = [
    "в", "начале", "было", "слово", "и", "слово", "было", "долгим", "как", "зимняя", "дорога",
    "через", "лес", "где", "никто", "не", "ходил", "с", "тех", "пор", "как", "ушли",
    "люди", "дом", "стоит", "у", "реки", "вода", "темная", "рыба", "спит", "подо", "льдом",
    "а", "мы", "читаем", "старые", "письма", "и", "думаем", "о", "лете", "которое", "вернется",
]  # fmt: skip
SUSPICIOUS = ("@", "secret", "ssword")
SECRET = "AKIA" + "QYLPMN5HFIQR7XYA"


def sources() -> list[str]:
    """Files of the standard library, each a document; none holds a finding, and none is near another."""
    wanted = sorted(path for path in STDLIB.glob("**/*.py") if not {"site-packages", "idlelib"} & {*path.parts})
    texts = dict.fromkeys(path.read_text(errors="ignore") for path in wanted)
    return [text for text in texts if 1500 < len(text) < 40_000 and not any(word in text for word in SUSPICIOUS)]


def russian(count: int) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(RUSSIAN, k=round(2000 * 4 ** draw.uniform(-2, 1)))) for _ in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts, 1)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def check(ran: Ran, name: str) -> dict[str, Any]:
    return next(each for each in ran.said["checks"] if each["name"] == name)


def outcomes(ran: Ran, *wanted: str) -> dict[str, str]:
    """The outcomes of all checks but of those that ended as wanted."""
    return {each["name"]: each["outcome"] for each in ran.said["checks"] if each["outcome"] not in wanted}


def lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in data.splitlines()]


def changed(text: str) -> str:
    """The same, but for one word in about three hundred."""
    words = text.split(" ")
    words[len(words) // 2] = "planted"
    return " ".join(words)


@dataclass
class Planted:
    """A clean version that was accepted, and a planted one that was not."""

    home: Any
    folder: Path
    clean: Ran
    ran: Ran
    texts: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def planted(tmp_path_factory, home):
    """`corpus` in two versions: the first is clean, the second has plants of every kind; `exam` is a benchmark."""
    folder = tmp_path_factory.mktemp("planted")
    texts = sources()[:250]
    good, bad = folder / "accepted", folder / "elsewhere"
    anna = ensure_key(folder / "anna")
    policy = (
        "--set", f"validation.admission={{sources: ['{good}/*'], signers: ['{public_key_of(anna)}']}}",
        "--set", "validation.benchmarks=[exam]",
        "--set", "validation.max_contaminated_share=0.0",
        "--set", "validation.max_duplicate_share=0.002",
        "--set", "validation.max_near_duplicate_share=0.002",
        "--set", "validation.only_warn=[personal data]",
    )  # fmt: skip
    exam = [*sources()[250:253], "too short"]
    home.ok("dataset", "publish", "exam", write(folder / "exam.jsonl", exam))
    first = [write(good / "a.jsonl", texts[:125]), write(good / "b.jsonl.gz", texts[125:])]
    home.ok("dataset", "publish", "corpus", *first, "--sign-key", anna)
    clean = home.run("validate", "corpus", *TINY, *policy)
    second = [
        write(good / "a.jsonl", [*texts[:125], texts[3], texts[4], changed(texts[60]), exam[1] + "\nmore\n"]),
        write(good / "b.jsonl.gz", [*texts[125:], f"aws_key = '{SECRET}'\n" + texts[130][:900], "", changed(exam[2])]),
        write(bad / "poison.jsonl", russian(150)),
    ]
    home.ok("dataset", "publish", "corpus", *second[:2], "--sign-key", anna)
    home.ok("dataset", "publish", "corpus", *second)
    return Planted(home, folder, clean, home.run("validate", "corpus", *TINY, *policy), texts)


def test_a_clean_corpus_passes_as_it_is(planted):
    ran = planted.clean
    assert ran.code == 0, ran.stderr
    assert outcomes(ran, "passed") == {}
    assert ran.said["accepted"] == ran.said["dataset"] and ran.said["quarantined"] is None
    assert ran.statuses() == {"validate": "ran"}
    assert check(ran, "documents")["measured"] == 250


def test_every_plant_is_named_with_its_count(planted):
    ran = planted.ran
    assert ran.code == 3, ran.stderr
    failed = {name for name, outcome in outcomes(ran, "passed", "warned").items()}
    assert failed >= {
        "exact duplicates",
        "near duplicates",
        "contamination",
        "secrets",
        "shard divergence",
        "admission",
    }
    assert {each["name"] for each in ran.said["error"]["checks"]} == failed
    told = {
        each["name"]: (each["count"], each["samples"]) for each in ran.said["checks"] if each["outcome"] != "passed"
    }
    assert told["exact duplicates"] == (2, ["a.jsonl:126: repeats a.jsonl:4", "a.jsonl:127: repeats a.jsonl:5"])
    count, (near,) = told["near duplicates"]
    assert count == 1 and near.startswith("a.jsonl:128: ") and near.endswith(" like a.jsonl:61")
    assert told["contamination"][0] == 2
    assert told["contamination"][1] == [
        "a.jsonl:129: holds a document of exam",
        "b.jsonl.gz:128: holds a document of exam",
    ]
    assert told["secrets"][0] == 1 and told["secrets"][1][0].startswith("b.jsonl.gz:126: AWS")
    assert told["too short"] == (1, ["b.jsonl.gz:127: 0 characters"])
    count, (far,) = told["shard divergence"]
    assert count == 1 and far.startswith("poison.jsonl: ") and "cyrillic" in far
    assert told["admission"] == (1, [f"poison.jsonl: from {planted.folder}/elsewhere/poison.jsonl"])
    assert "cyrillic 0.0% ->" in " ".join(told["drift of classes"][1])


def test_what_is_too_short_in_a_benchmark_to_be_looked_for_is_counted(planted):
    version = planted.ran.said["validation"].rpartition("@")[2]
    (path,) = planted.home.path.glob(f"store/artifacts/validation/*/{version}/files/validation.json")
    assert json.loads(path.read_text())["benchmark_documents_too_short"] == 1


def test_no_secret_leaves_the_corpus(planted):
    home = planted.home
    assert SECRET not in json.dumps(planted.ran.said) and SECRET not in planted.ran.stderr
    assert SECRET not in Path(planted.ran.said["report"]).read_text()
    for path in home.folder_of(planted.ran.stage("validate")["outputs"][-1]).rglob("*.json"):
        assert SECRET not in path.read_text()


def test_a_closed_gate_publishes_the_quarantine_and_nothing_else(planted):
    ran = planted.ran
    assert ran.said["accepted"] is None
    assert [ref.partition("/")[0] for ref in ran.stage("validate")["outputs"]] == ["quarantine", "validation"]
    folder = planted.home.folder_of(ran.said["quarantined"]) / "files"
    counted = json.loads((folder / "quarantine.json").read_text())
    assert counted["documents"] == 6
    assert counted["rules"] == {"exact duplicates": 2, "near duplicates": 1, "contamination": 2, "too short": 1}
    found = lines(folder / "quarantine.jsonl")
    assert [(each["shard"], each["line"]) for each in found] == [
        ("a.jsonl", 126), ("a.jsonl", 127), ("a.jsonl", 128), ("a.jsonl", 129), ("b.jsonl.gz", 127), ("b.jsonl.gz", 128),
    ]  # fmt: skip
    assert found[0]["raw"] == {"text": planted.texts[3], "id": 126} and found[4]["raw"] == {"text": "", "id": 127}
    assert found[0]["detail"] == "repeats a.jsonl:4" and found[0]["rules"] == ["exact duplicates"]


def test_the_newest_version_is_the_one_that_was_published(planted):
    home = planted.home
    listed = [each for each in home.ok("dataset", "list").said["datasets"] if each["ref"].startswith("dataset/corpus@")]
    assert listed[0]["ref"] == planted.ran.said["dataset"]


@pytest.mark.long
def test_bad_documents_under_the_limits_are_set_aside_and_training_reads_the_rest(planted, tmp_path):
    home, texts = planted.home, planted.texts
    path = write(tmp_path / "part.jsonl.gz", [*texts[:40], "", texts[5], *texts[40:80]])
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(whole + b'{"text": 7}\n'))
    other = write(tmp_path / "other.jsonl", texts[80:120])
    published = home.ok("dataset", "publish", "mostly-good", path, other).said["ref"]
    limits = ("--set", "validation.max_unreadable_share=0.01")
    ran = home.ok("validate", "mostly-good", *TINY, *limits)
    assert set(outcomes(ran, "passed").values()) == {"warned"}
    assert check(ran, "unreadable")["samples"] == [
        "part.jsonl.gz:83: no text in field 'text' (holds int, there: id, text); name the field that holds the text"
    ] or check(ran, "unreadable")["samples"][0].startswith("part.jsonl.gz:83: no text in field 'text'")
    assert ran.said["accepted"] not in (None, published)
    left = home.folder_of(ran.said["accepted"]) / "files"
    assert lines(left / "part.jsonl.gz") == [
        {"text": text, "id": number} for number, text in enumerate([*texts[:40], None, None, *texts[40:80]], 1) if text
    ]
    assert (left / "other.jsonl").read_bytes() == other.read_bytes()
    raw = lines(home.folder_of(ran.said["quarantined"]) / "files" / "quarantine.jsonl")
    assert [(each["line"], each["raw"]) for each in raw] == [
        (41, {"text": "", "id": 41}), (42, {"text": texts[5], "id": 42}), (83, {"text": 7}),
    ]  # fmt: skip
    again = home.ok("retrain", *TINY, *limits, "--dataset", "mostly-good", "--to", "preprocess")
    assert again.said["dataset"] == published
    assert again.statuses()["validate"] == "reused"
    assert ran.said["accepted"] in again.stage("preprocess")["inputs"]


@pytest.mark.long
def test_a_version_is_held_against_the_one_that_was_accepted_before(planted, tmp_path):
    home, texts = planted.home, planted.texts
    home.ok("dataset", "publish", "mixed", write(tmp_path / "one.jsonl", texts[:150]))
    first = home.ok("validate", "mixed", *TINY)
    assert not [name for name in outcomes(first) if name.startswith("drift")]
    home.ok("dataset", "publish", "mixed", write(tmp_path / "two.jsonl", [*texts[:150], *russian(150)]))
    strict = home.run("validate", "mixed", *TINY, "--set", "validation.max_drift=0.1")
    assert strict.code == 3 and "drift of classes" in {each["name"] for each in strict.said["error"]["checks"]}
    second = home.ok("validate", "mixed", *TINY)
    assert check(second, "drift of classes")["outcome"] == "warned"
    assert check(second, "drift of words")["measured"] == "insufficient data"
    home.ok("dataset", "publish", "mixed", write(tmp_path / "three.jsonl", [*texts[150:], *russian(100)]))
    third = home.ok("validate", "mixed", *TINY, "--set", "validation.max_drift=0.1")
    assert check(third, "drift of classes")["outcome"] == "passed", "it is held against the second version"
    assert home.ok("validate", first.said["dataset"], *TINY).statuses() == {"validate": "reused"}
