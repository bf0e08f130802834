"""`headway preprocess`, `tokens` and `mixture`, as people and machines run them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import HEADWAY
from token_material import AWKWARD, make_tokenizer, words, write_documents

PLAIN = [sys.executable, "-c", "from deployments.cli.main import run; run()"]
"""Which is never a fork of the tests: its workers are of its process group."""
TEXTS = [*AWKWARD, *(words(50, i) for i in range(200))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cli")
    make_tokenizer("pieces", made / "tokenizer")
    write_documents(made / "a.jsonl", TEXTS)
    return made


@pytest.fixture(scope="module")
def tokens(folder):
    """The tokens of all documents, once: their prefix, and what the command told of them."""
    said = _json(_arguments(folder, folder / "out", "--append-eod", "--workers", "2"))
    return folder / "out_text_document", said


def test_the_json_is_what_is_documented(folder, tokens):
    prefix, said = tokens
    size = (folder / "a.jsonl").stat().st_size
    assert {"schema", "exit_code", "error"} < set(said)
    assert (said["vocab_size"], said["eod_id"], said["bytes_read"]) == (2000, 2, size)
    assert said["seconds"] > 0 and said["engine"] == "gigatoken" and said["resumed_units"] == 0
    (output,) = said["outputs"]
    assert output["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert {**output, "tokens": 0, "bytes": 0} == {
        "split": "",
        "key": "text",
        "bin": f"{prefix}.bin",
        "idx": f"{prefix}.idx",
        "documents": len(TEXTS),
        "sequences": len(TEXTS),
        "tokens": 0,
        "bytes": 0,
        "dtype": "uint16",
    }
    assert output["tokens"] * 2 == Path(output["bin"]).stat().st_size
    assert said["arguments"] == ["--data-path", str(prefix)]


def test_splits_are_named_and_hold_everything_once(folder, tmp_path):
    said = _json(_arguments(folder, tmp_path / "out", "--split", "0.7,0.2,0.1"))
    assert [Path(output["bin"]).name for output in said["outputs"]] == [
        f"out_{split}_text_document.bin" for split in ("train", "valid", "test")
    ]
    assert sum(output["documents"] for output in said["outputs"]) == len(TEXTS)
    held = _json(["tokens", str(tmp_path / "out_train_text_document")])
    assert held["documents"] == said["outputs"][0]["documents"]


def test_people_see_what_was_done_and_what_megatron_takes(folder, tmp_path):
    ran = _run(_arguments(folder, tmp_path / "out", "--append-eod"))
    assert ran.returncode == 0
    assert f"out_text_document.bin  {len(TEXTS)} documents" in ran.stdout
    assert "MB/s" in ran.stdout and f"--data-path {tmp_path / 'out_text_document'}" in ran.stdout
    again = _run(_arguments(folder, tmp_path / "out", "--append-eod"))
    assert "was there already" in again.stdout


def test_tokens_shows_what_megatron_core_wrote(folder, tmp_path):
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in TEXTS:
        ids = [*tokenizer.encode(text).ids, 2]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    said = _json(["tokens", str(tmp_path / "theirs.bin"), "--tokenizer-model", str(folder / "tokenizer")])
    assert (said["documents"], said["sequences"]) == (len(TEXTS), len(TEXTS))
    assert said["last_tokens"] == [{"token": 2, "sequences": len(TEXTS)}]
    assert said["lengths"]["min"] == 2
    shown = _run(["tokens", str(tmp_path / "theirs")]).stdout
    assert "sound" in shown and "━" in shown


def test_a_tokenizer_beside_the_tokens_decodes_a_sample(folder, tmp_path):
    write_documents(tmp_path / "x.jsonl", ["Hello, sample."])
    make_tokenizer("pieces", tmp_path / "tokenizer")
    _json(_arguments(folder, tmp_path / "out", "--append-eod", source=tmp_path / "x.jsonl"))
    assert _json(["tokens", str(tmp_path / "out_text_document")])["sample"] == "<s> Hello, sample.</s>"


def test_damage_leaves_with_the_code_for_integrity(tokens, tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{tokens[0]}{suffix}", tmp_path)
    os.truncate(tmp_path / "out_text_document.bin", 100)
    said = _json(["tokens", str(tmp_path / "out_text_document")], code=5)
    assert "out_text_document.bin has 100 bytes" in said["error"]["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--split", "0.9,0.3"), "must add up to 1"),
        (("--json-keys", "content"), "a.jsonl:1: no text in field 'content'"),
        (("--input", "absent.jsonl"), "absent.jsonl does not exist"),
        (("--tokenizer-model", "absent"), "absent does not exist"),
    ],
)
def test_a_mistake_is_named_and_leaves_with_the_code_for_usage(folder, tmp_path, more, said):
    assert said in _json(_arguments(folder, tmp_path / "out", *more), code=2)["error"]["message"]
    assert not list(tmp_path.glob("out_*"))


def test_a_mixture_is_said_as_megatron_takes_it(tokens):
    prefix = str(tokens[0])
    assert _json(["mixture", "2", prefix])["arguments"] == ["--data-path", prefix]
    assert "is no weight" in _json(["mixture", prefix, "2"], code=2)["error"]["message"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_stopping_leaves_no_worker_and_the_same_command_goes_on(folder, tmp_path, number):
    source = write_documents(tmp_path / "big.jsonl", [words(20_000, i) * 8 for i in range(200)])
    command = [*PLAIN, *_arguments(folder, tmp_path / "out", "--workers", "2", "--json", source=source)]
    for _ in range(5):  # on a busy machine it may have ended before the signal came
        for path in tmp_path.glob("out_*"):
            path.unlink()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        while not list((tmp_path / "out.parts").glob("*.json")) and running.poll() is None:
            time.sleep(0.005)
        running.send_signal(number)
        said = json.loads(running.communicate()[0])
        if running.returncode:
            break
    assert (running.returncode, said["exit_code"]) == (130, 130)
    assert "run the same command again" in said["error"]["remedy"].lower()
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)
    assert not list(tmp_path.glob("out_*"))
    again = _json(_arguments(folder, tmp_path / "out", source=source))
    assert 0 < again["resumed_units"] < again["units"]


def _arguments(folder, prefix, *more, source=None):
    given = ["--input", str(source or folder / "a.jsonl"), "--tokenizer-model", str(folder / "tokenizer")]
    return ["preprocess", *given, "--output-prefix", str(prefix), *more]


def _run(arguments):
    return subprocess.run([HEADWAY, *arguments], capture_output=True, text=True, check=False)


def _json(arguments, code=0):
    ran = _run([*arguments, "--json"])
    assert ran.returncode == code, ran.stderr
    said = json.loads(ran.stdout)
    assert said["exit_code"] == code
    return said
