"""`headway drift` as a person uses it: datasets by name, files and folders, a tokenizer, and what is wrong."""

import json
import random

from support import STDLIB
from waiting import limit

QUICK = ("--set", "drift.splits=100")


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(seed, count=120):
    dice = random.Random(seed)
    return [" ".join(dice.choices(("alpha", "beta", "gamma", "delta", "omega"), k=30)) for _ in range(count)]


def test_datasets_and_files_are_compared_and_nothing_is_started(fresh, tmp_path):
    published = fresh.ok("dataset", "publish", "known", write(tmp_path / "a.jsonl", texts(1))).said["ref"]
    found = fresh.ok("drift", "known", write(tmp_path / "b.jsonl", texts(2)), *QUICK).said["drift"]
    assert found["verdict"] == "none" and found["reference"] == published and found["splits"] == 100
    assert found["new"] == str(tmp_path / "b.jsonl")
    found = fresh.ok("drift", published, STDLIB / "email", *QUICK, "--set", "drift.min_documents=20").said["drift"]
    assert found["verdict"] == "drift" and {"tokens", "domain"} <= {
        c["name"] for c in found["columns"] if c["verdict"] == "drift"
    }
    assert not (fresh.path / "prefect").exists() and not (fresh.path / "store" / "artifacts" / "drift").exists()


def test_people_read_the_verdict_first_and_what_moved(fresh, tmp_path):
    old = write(tmp_path / "a.jsonl", texts(1))
    new = write(tmp_path / "b.jsonl", [text.replace("omega", "kvasir") for text in texts(2)])
    process = fresh.start("drift", old, new, *QUICK)
    out, err = process.communicate(timeout=limit(120))
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("drift: ") and "kvasir 0.0 % ->" in lines[0]
    assert any(line.startswith("tokens ") and "DRIFT" in line for line in lines)
    assert "Words that tell them apart, by documents: kvasir 0.0% -> 100.0%" in lines[-1]


def test_what_is_wrong_is_named(fresh, tmp_path):
    old = write(tmp_path / "a.jsonl", texts(1))
    for words, said in (
        ((old, "no-such"), "dataset/no-such"),
        ((old, old, "--set", "drift.split=3"), "did you mean drift.splits?"),
        ((old, old, "--tokenizer", tmp_path), "tokenizer"),
        ((old, tmp_path / "nothing"), "nothing"),
    ):
        ran = fresh.run("drift", *words)
        assert ran.code in (2, 6) and said in ran.said["error"]["message"], ran.stderr
