"""`headway validate` as a person uses it: names and files, the table, and what is wrong before anything starts."""

import json

import pytest
from waiting import limit

QUICK = ("-c", "tiny", "--set", "validation.near_duplicates=false")


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def texts():
    return [f"document {number} says {number * 7919} and nothing more" for number in range(20)]


def test_a_file_becomes_a_dataset_of_its_own_name_and_is_judged(home, tmp_path, texts):
    path = write(tmp_path / "Some Corpus.v2.jsonl", texts)
    ran = home.ok("validate", path, *QUICK)
    assert ran.said["dataset"].startswith("dataset/some-corpus@") and ran.said["accepted"] == ran.said["dataset"]
    assert ran.said["validation"].startswith("validation/some-corpus@")
    again = home.ok("validate", path, *QUICK, "--name", "named")
    assert again.said["dataset"].startswith("dataset/named@")
    folder = home.path.parent / "named"  # a name means the dataset, and a path the file
    folder.mkdir()
    write(folder / "a.jsonl", texts[:15])
    by_name = home.ok("validate", "named", *QUICK)
    assert by_name.statuses() == {"validate": "reused"} and by_name.said["dataset"] == again.said["dataset"]
    by_path = home.ok("validate", "./named", *QUICK).said
    assert by_path["dataset"] != again.said["dataset"]
    assert next(c["measured"] for c in by_path["checks"] if c["name"] == "documents") == 15


def test_people_read_a_table_with_what_breaks_a_rule(home, tmp_path, texts):
    home.ok("dataset", "publish", "shown", write(tmp_path / "a.jsonl", [*texts, texts[3], texts[4]]))
    process = home.start("validate", "shown", *QUICK, "--set", "validation.max_duplicate_share=0.05")
    _, err = process.communicate(timeout=limit(300))
    assert process.returncode == 3, err
    rows = {line[:22].strip(): line.split() for line in err.splitlines()}
    assert rows["exact duplicates"][2:] == ["failed", "9.09%", "<=", "5.00%", "of", "documents", "2"]
    assert rows["documents"][1:] == ["passed", "22", ">=", "5"]
    assert "  exact duplicates: a.jsonl:21: repeats a.jsonl:4" in err.splitlines()
    assert "quarantined: quarantine/shown@" in err and "accepted:" not in err
    assert "Or raise validation.max_duplicate_share." in err


def test_of_a_broken_line_people_read_once_what_is_wrong_and_where(home, tmp_path, texts):
    path = write(
        tmp_path / "broken.jsonl", texts * 10
    )  # what is broken among the first lines is refused when it is published
    with path.open("a") as file:
        file.write('{"text": "b"\n')
    home.ok("dataset", "publish", "broken", path)
    process = home.start("validate", "broken", *QUICK, "--set", "validation.max_duplicate_share=1")
    out, err = process.communicate(timeout=limit(300))
    lines = [line.strip() for line in (out + err).splitlines() if line.strip()]
    assert "broken.jsonl:201: not a JSON line: Expecting ',' delimiter at its end, after 12 characters" in " ".join(
        lines
    )
    assert len(lines) == len(set(lines)), lines


def test_what_is_wrong_is_said_before_anything_starts(fresh, tmp_path, texts):
    fresh.ok("dataset", "publish", "there", write(tmp_path / "a.jsonl", texts))
    for words, said in (
        (("no-such",), "dataset/no-such"),
        (("there", "--set", "validation.max_drfit=1"), "did you mean validation.max_drift?"),
        (("there", "--name", "x"), "--name"),
        (("there", "--set", "validation.only_warn=[nothing]"), "only_warn"),
    ):
        ran = fresh.run("validate", *words)
        assert ran.code == 2 and said in ran.said["error"]["message"], ran.stderr
    assert not (fresh.path / "prefect").exists()


def test_a_benchmark_or_class_that_there_is_not_is_named(home, tmp_path, texts):
    home.ok("dataset", "publish", "alone", write(tmp_path / "a.jsonl", texts))
    ran = home.run("validate", "alone", *QUICK, "--set", "validation.benchmarks=[no-exam]")
    assert ran.code == 2 and "dataset/no-exam" in ran.said["error"]["message"]
    ran = home.run("validate", "alone", *QUICK, "--set", "validation.min_class_share={runes: 0.1}")
    message = ran.said["error"]["message"]
    assert ran.code == 2 and "min_class_share.runes" in message and "'letters', 'digits'" in message
