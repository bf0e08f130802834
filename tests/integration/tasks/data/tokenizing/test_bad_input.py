"""What cannot be encoded: a clear error with shard and line, and nothing half-written that counts as done."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from token_material import make_tokenizer, words, write_documents

from tasks.data.corpus import reading
from tasks.data.tokenizing import units as units_module
from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.splits import Splits
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Work
from tasks.formats.mmididx import open_tokens

COMMAND = "# fork: commands\nfrom deployments.cli.main import run; run()"
GOOD = [json.dumps({"text": f"document {i}"}).encode() for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "half a li', "not a JSON line"),
        (b'{"content": "another field"}', "no text in field 'text'.*there: content"),
        (b'{"text": 5}', "no text in field .text. .it is a number"),
        (b'{"text": ["a", "b"]}', "no text in field .text. .it is a list"),
        (b'"only a string"', "no text in field .text."),
        (b'{"text": "broken \xff\xfe"}', "not UTF-8 at byte 17"),
        (b'{"text": "raw nul \x00"}', "not a JSON line"),
        (b'{"text": "lone \\ud800 surrogate"}', "lone surrogate"),
        (b'{"text": null}', "no text in field"),
        (b"", "not a JSON line"),
    ],
)
def test_a_line_that_is_no_document_is_named(tokenizer, tmp_path, line, said):
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(GOOD) + b"\n")
    (tmp_path / "shard.jsonl").write_bytes(b"\n".join([*GOOD[:12], line, *GOOD]) + b"\n")
    inputs = [tmp_path / "good.jsonl", tmp_path / "shard.jsonl"]
    _refused(tokenizer, tmp_path, inputs, rf"shard\.jsonl:13: .*{said}", workers=2)


def test_a_nul_in_a_document_is_text(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\u0000b"}\n')
    preprocess(plan([tmp_path / "a.jsonl"], Work(tokenizer), prefix=tmp_path / "out"), workers=1)
    assert open_tokens(tmp_path / "out_text_document").lengths.tolist() == [4]


def test_a_line_far_into_a_shard_is_counted_from_its_beginning(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(units_module, "LEAST_UNIT", 100)
    (tmp_path / "shard.jsonl").write_bytes(b"\n".join([*GOOD, b"{", *GOOD]) + b"\n")
    _refused(tokenizer, tmp_path, [tmp_path / "shard.jsonl"], r"shard\.jsonl:21: not a JSON line")


def test_a_cut_gzip_is_named(tokenizer, tmp_path):
    whole = gzip.compress(b"\n".join(json.dumps({"text": words(300, i)}).encode() for i in range(50)))
    (tmp_path / "shard.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    _refused(tokenizer, tmp_path, [tmp_path / "shard.jsonl.gz"], r"shard\.jsonl\.gz, after line \d+: cannot be read")


def test_a_line_over_the_limit_is_named(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LINE_LIMIT", 1 << 20)
    long = json.dumps({"text": "x" * (2 << 20)}).encode()
    (tmp_path / "shard.jsonl").write_bytes(b"\n".join([*GOOD, long, *GOOD]))
    _refused(tokenizer, tmp_path, [tmp_path / "shard.jsonl"], r"shard\.jsonl:21: a line of more than 1 MiB")


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_file_is_no_corpus(tokenizer, tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    _refused(tokenizer, tmp_path, [tmp_path / "empty.jsonl"], "no documents|not a JSON line")


def test_a_split_without_documents_is_named(tokenizer, tmp_path):
    (tmp_path / "few.jsonl").write_bytes(GOOD[0] + b"\n")
    with pytest.raises(ValueError, match=r"the heldout split has no documents, its share is 0\.001"):
        work = Work(tokenizer, splits=Splits((0.999, 0.001)))
        preprocess(plan([tmp_path / "few.jsonl"], work, prefix=tmp_path / "out"), workers=1)
    assert not list(tmp_path.glob("out_*"))


def test_a_file_that_changes_meanwhile_is_not_encoded_half(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(units_module, "LEAST_UNIT", 100)
    source = tmp_path / "shard.jsonl"
    source.write_bytes(b"\n".join(GOOD) + b"\n")
    changed = []

    def change(read):
        if not changed:
            changed.append(source.write_bytes(b"\n".join([*GOOD, *GOOD]) + b"\n"))

    with pytest.raises(ValueError, match=r"shard\.jsonl was changed while it was being read"):
        preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "out"), workers=1, report=change)
    assert not list(tmp_path.glob("out_*"))
    preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "out"), workers=1)
    assert open_tokens(tmp_path / "out_text_document").document_count == 2 * len(GOOD)


def test_a_folder_that_is_not_there_is_named_before_the_work(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD[0])
    with pytest.raises(ValueError, match="nowhere is no folder"):
        plan([tmp_path / "a.jsonl"], Work(tokenizer), prefix=tmp_path / "nowhere" / "out")


def test_input_that_is_not_there_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"absent\*\.jsonl does not exist and matches nothing"):
        plan([tmp_path / "absent*.jsonl"], Work(tokenizer), prefix=tmp_path / "out")


def test_an_end_of_document_that_is_not_there_is_named_before_the_work(tmp_path):
    folder = make_tokenizer("bytes", tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_bytes(GOOD[0])
    with pytest.raises(ValueError, match="no end-of-document token"):
        plan([tmp_path / "a.jsonl"], Work(open_tokenizer(folder)), prefix=tmp_path / "out")


def test_no_room_leaves_nothing_that_counts_and_the_same_command_goes_on(folder, tmp_path):
    """A limit on the size of files stands for the full disk: the error is the system's, and the rest is done later."""
    source = write_documents(tmp_path / "source.jsonl", [words(2000, i) for i in range(60)])
    arguments = ["--input", str(source), "--tokenizer-model", str(folder), "--output-prefix", str(tmp_path / "out")]
    command = [sys.executable, "-c", COMMAND, "preprocess", *arguments, "--json"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_little_room)
    assert failed.returncode != 0
    assert json.loads(failed.stdout)["error"]["message"]
    assert not list(tmp_path.glob("out_*"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["outputs"][0]["documents"] == 60


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_said_with_its_remedy(folder, tmp_path):
    source = write_documents(tmp_path / "source.jsonl", [words(2000, i) for i in range(300)])
    (tmp_path / "disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(tmp_path / "disk")], check=False
    ).returncode:
        pytest.skip("no small disk can be mounted here")
    arguments = [
        "--input",
        str(source),
        "--tokenizer-model",
        str(folder),
        "--output-prefix",
        str(tmp_path / "disk" / "out"),
    ]
    command = [sys.executable, "-c", COMMAND, "preprocess", *arguments, "--json"]
    try:
        failed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert failed.returncode == 6
        assert "Free space on the disk" in json.loads(failed.stdout)["error"]["remedy"]
        assert not list((tmp_path / "disk").glob("out_*"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "disk")], check=True)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["outputs"][0]["documents"] == 300
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def _little_room():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def _refused(tokenizer, folder, inputs, said, *, workers=1):
    with pytest.raises(ValueError, match=said):
        preprocess(plan(inputs, Work(tokenizer), prefix=folder / "out"), workers=workers)
    assert not list(folder.glob("out_*")), "nothing that looks done"
