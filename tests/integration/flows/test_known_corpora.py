"""`headway validate` against earlier corpora: the index is an artifact, in the lineage of who was compared with it."""

import json

import pytest
from support import STDLIB

TINY = ("-c", "tiny")
INDEX = ("--set", "validation.index=true")


def sources(count):
    """Files of the standard library, each a document; none is near another, and none breaks a rule."""
    wanted = sorted(path for path in STDLIB.glob("*.py") if 1500 < path.stat().st_size < 40_000)
    texts = (path.read_text(errors="ignore") for path in wanted)
    return [text for text in texts if not any(word in text for word in ("@", "secret", "ssword"))][:count]


def changed(text):
    """The same, but for one word in several hundred."""
    words = text.split(" ")
    words[len(words) // 2] = "planted"
    return " ".join(words)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(ran, name):
    return next(each for each in ran.said["checks"] if each["name"] == name)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, home):
    """`books` is validated with an index; `news` repeats two of its documents and nearly a third one."""
    folder, texts = tmp_path_factory.mktemp("known"), sources(60)
    home.ok("dataset", "publish", "books", write(folder / "books.jsonl", texts[:30]))
    books = home.ok("validate", "books", *TINY, *INDEX)
    repeated = [texts[3], texts[29], changed(texts[7])]
    home.ok("dataset", "publish", "news", write(folder / "news.jsonl", [*texts[30:], *repeated]))
    return home, books, home.ok("validate", "news", *TINY, "--set", "validation.against=[books]", *INDEX)


def of_kind(ran, kind):
    return [ref for ref in ran.stage("validate")["outputs"] if ref.startswith(f"{kind}/")]


def test_documents_of_an_earlier_corpus_are_set_aside_with_their_place(ran):
    home, _, news = ran
    assert check(news, "exact duplicates")["samples"] == [
        "news.jsonl:31: repeats books: books.jsonl:4",
        "news.jsonl:32: repeats books: books.jsonl:30",
    ]
    (near,) = check(news, "near duplicates")["samples"]
    assert near.startswith("news.jsonl:33: ") and near.endswith(" like books: books.jsonl:8")
    quarantined = lines(home.folder_of(news.said["quarantined"]) / "files" / "quarantine.jsonl")
    assert [each["line"] for each in quarantined] == [31, 32, 33]
    verdict = home.folder_of(of_kind(news, "validation")[0]) / "files" / "validation.json"
    assert json.loads(verdict.read_text())["known"] == 3


def test_the_index_is_in_the_lineage_and_knows_what_was_accepted_only(ran):
    home, books, news = ran
    (known,), (own,) = of_kind(books, "index"), of_kind(news, "index")
    manifest = json.loads((home.folder_of(of_kind(news, "validation")[0]) / "manifest.json").read_text())
    assert known in manifest["provenance"]["inputs"] and own in manifest["provenance"]["inputs"]
    about = [json.loads((home.folder_of(ref) / "files" / "index.json").read_text()) for ref in (known, own)]
    assert [each["documents"] for each in about] == [30, 30]


def test_the_same_verdict_is_reused_and_one_against_nothing_is_another(ran):
    home, _, news = ran
    again = home.ok("validate", "news", *TINY, "--set", "validation.against=[books]", *INDEX)
    assert again.statuses() == {"validate": "reused"} and again.said["validation"] == news.said["validation"]


def test_an_index_that_is_missing_or_of_the_dataset_itself_is_refused_by_name(ran):
    home, _, _ = ran
    missing = home.run("validate", "news", *TINY, "--set", "validation.against=[letters]")
    assert missing.code == 2 and "index/letters" in missing.said["error"]["message"]
    assert "validation.index=true" in missing.said["error"]["remedy"]
    own = home.run("validate", "books", *TINY, "--set", "validation.against=[books]")
    assert own.code == 2 and "index/books" in own.said["error"]["message"] and "itself" in own.said["error"]["message"]


def test_an_index_that_was_changed_is_refused_by_name(ran):
    home, books, _ = ran
    (known,) = of_kind(books, "index")
    path = home.folder_of(known) / "files" / "signatures.bin"
    before = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    try:
        ran = home.run(
            "validate", "news", *TINY, "--set", "validation.against=[books]", "--set", "validation.min_documents=11"
        )
    finally:
        path.write_bytes(before)
    assert ran.code == 5, ran.stderr
    assert "index/books" in ran.said["error"]["message"] and ran.said["error"]["remedy"]
