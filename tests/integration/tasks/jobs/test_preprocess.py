"""The preprocessing program as ranks of a job: alone, together, killed, with a tokenizer of its own, on any container."""

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from waiting import limit

from tasks.config.data import PreprocessingConfig, TokenizerConfig
from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.tokenizing.splits import split_of
from tasks.data.tokenizing.units import unit_bytes
from tasks.formats.mmididx import open_split, open_tokens
from tasks.jobs.preprocess import sample, save_tokenizer

CONFIG = PreprocessingConfig(heldout_fraction=0.2, tokenizer=TokenizerConfig(vocab_size=300, sample_bytes=200_000))
COUNT = 2600
OUTPUTS = [f"{split}_text_document.{ending}" for split in ("train", "heldout") for ending in ("bin", "idx")]


def text(number):
    words = " ".join(f"value_{number * step % 97} = compute({step})" for step in range(1, 40))
    return f"# document {number}\ndef function_{number}():\n    {words}\n"


def lines(numbers):
    return "".join(json.dumps({"text": text(number)}) + "\n" for number in numbers).encode()


def dataset(folder, count=COUNT):
    """About 3 MB in three shards: more than one unit."""
    folder.mkdir(parents=True)
    third = count // 3
    (folder / "a.jsonl").write_bytes(lines(range(third)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(range(third, 2 * third)), mtime=0))
    (folder / "c.jsonl").write_bytes(lines(range(2 * third, count)))
    return folder


def job(folder, inputs, config=CONFIG, threads=1):
    folder.mkdir(parents=True)
    settings = {"preprocessing": config.model_dump(mode="json"), "threads": threads}
    spec = {"settings": settings, "inputs": {name: str(path) for name, path in inputs.items()}}
    (folder / "config.json").write_text(json.dumps(spec))
    return folder


def start(folder, rank=0, world=1):
    environment = {**os.environ, "HEADWAY_JOB": str(folder), "RANK": str(rank), "WORLD_SIZE": str(world)}
    return subprocess.Popen([sys.executable, "-m", "tasks.jobs.preprocess"], env=environment)


def done(folder, world=1):
    """The digest of every output, after all ranks ended well."""
    ranks = [start(folder, rank, world) for rank in range(world)]
    codes = [rank.wait(limit(120)) for rank in ranks]
    assert codes == [0] * world, [log.read_text() for log in (folder / "logs").iterdir()]
    return {name: (folder / "out" / "tokens" / name).read_bytes() for name in OUTPUTS}


def said(folder):
    return json.loads((folder / "errors" / "rank-0.json").read_text())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("corpus") / "dataset")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    folder = job(tmp_path_factory.mktemp("whole") / "job", {"dataset": corpus})
    return done(folder), folder


def test_every_document_stands_on_its_side_and_comes_back(whole):
    _, folder = whole
    tokens = folder / "out" / "tokens"
    about = json.loads((tokens / "tokens.json").read_text())
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    sides = {"train": [], "heldout": []}
    for number in range(COUNT):
        sides["heldout" if split_of(text(number), (0.8, 0.2)) else "train"].append(text(number))
    for split, expected in sides.items():
        opened = open_tokens(tokens / f"{split}_text_document")
        ends = opened.boundaries
        found = [opened.tokens[a : b - 1].tolist() for a, b in itertools.pairwise(ends)]
        assert (opened.tokens[ends[1:] - 1] == about["eod_id"]).all()
        assert tokenizer.decode_batch(found) == expected
        assert about["splits"][split]["documents"] == len(expected)
        assert about["splits"][split]["tokens"] == len(opened.tokens)
        assert about["splits"][split]["bytes"] == sum(len(text.encode()) for text in expected)


def test_two_ranks_write_the_same_bytes(corpus, whole, tmp_path):
    assert done(job(tmp_path / "job", {"dataset": corpus}), world=2) == whole[0]


def test_ranks_that_were_killed_when_all_was_in_place_have_nothing_left_to_do(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", {"dataset": corpus})
    assert done(folder, world=2) == whole[0]
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    (folder / "parts").mkdir()  # not cleared up either
    written = (folder / "out" / "tokens" / "train_text_document.bin").stat().st_ino
    assert done(folder, world=2) == whole[0]
    assert json.loads((folder / "result.json").read_text())["metrics"] == result["metrics"]
    assert (folder / "out" / "tokens" / "train_text_document.bin").stat().st_ino == written
    assert not (folder / "parts").exists()


def test_a_tokenizer_that_was_saved_before_a_kill_and_not_marked_is_trained_again(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", {"dataset": corpus})
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("torn")
    assert done(folder) == whole[0]


def test_a_training_split_of_many_files_is_the_one_file_cut_between_units(corpus, whole, tmp_path):
    """Two ranks write and check the files side by side; what reads them reads one stream, whole documents in each file."""
    config = CONFIG.model_copy(update={"shard_gib": 1.0 / 1024})
    folders = [job(tmp_path / f"job-{world}", {"dataset": corpus}, config) for world in (1, 2)]
    for world, folder in enumerate(folders, 1):
        ranks = [start(folder, rank, world) for rank in range(world)]
        assert [rank.wait(limit(120)) for rank in ranks] == [0] * world, said(folder)
    tokens = [folder / "out" / "tokens" for folder in folders]
    names = sorted(path.name for path in tokens[0].iterdir())
    assert names == sorted(path.name for path in tokens[1].iterdir())
    binary = [name for name in names if name.endswith((".bin", ".idx"))]
    assert [(tokens[0] / name).read_bytes() for name in binary] == [(tokens[1] / name).read_bytes() for name in binary]
    about = json.loads((tokens[0] / "tokens.json").read_text())
    files = about["files"]["train"]
    assert len(files) > 1 and files[0] == "train-00000_text_document"
    assert {f"{name}.{ending}" for split in about["files"].values() for name in split for ending in ("bin", "idx")} == {
        *binary
    }
    assert b"".join((tokens[0] / f"{name}.bin").read_bytes() for name in files) == whole[0]["train_text_document.bin"]
    assert all((tokens[0] / f"{name}.bin").stat().st_size <= config.shard_gib * 2**30 for name in files[:-1])
    assert (tokens[0] / "heldout_text_document.idx").read_bytes() == whole[0]["heldout_text_document.idx"]
    one, many = open_tokens(whole[1] / "out" / "tokens" / "train_text_document"), open_split(tokens[0], "train")
    assert many.boundaries.tolist() == one.boundaries.tolist()
    assert many.tokens[:].tolist() == one.tokens.tolist()
    border = open_tokens(tokens[0] / files[0]).tokens.size
    assert many.tokens[border - 3 : border + 4].tolist() == one.tokens[border - 3 : border + 4].tolist()


def test_a_killed_rank_goes_on_with_the_rest(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", {"dataset": corpus})
    running = start(folder)
    deadline = time.monotonic() + limit(60)
    while not (kept := list((folder / "parts").glob("*.json"))):
        assert running.poll() is None, "it ended before it could be killed: make the corpus larger"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.wait()
    units = len(cut(shards := find_shards([corpus]), unit_bytes(shards)))
    assert 0 < len(kept) < units, f"{len(kept)} of {units} units were done"
    written = {path: path.stat().st_mtime_ns for path in kept}
    again = start(folder)
    while again.poll() is None:
        for path, at in written.items():
            try:
                assert path.stat().st_mtime_ns == at, "a unit with a receipt was done again"
            except FileNotFoundError:
                break  # merged, and cleaned up
    assert again.returncode == 0
    assert {name: (folder / "out" / "tokens" / name).read_bytes() for name in OUTPUTS} == whole[0]


def test_parquet_gives_the_tokens_of_json_lines(corpus, whole, tmp_path):
    (tmp_path / "dataset").mkdir()
    table = pa.table({"text": [text(number) for number in range(COUNT)]})
    pq.write_table(table, tmp_path / "dataset" / "a.parquet", row_group_size=700)
    tokenizer = whole[1] / "out" / "tokens" / "tokenizer"
    assert done(job(tmp_path / "job", {"dataset": tmp_path / "dataset", "tokenizer": tokenizer})) == whole[0]


def test_a_tokenizer_that_is_given_is_used_and_kept(corpus, tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=261, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text(1)], trainer)
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    folder = job(tmp_path / "job", {"dataset": corpus, "tokenizer": tmp_path / "tokenizer"})
    done(folder)
    about = json.loads((folder / "out" / "tokens" / "tokens.json").read_text())
    assert about["vocab_size"] == 261
    assert not (folder / "out" / "tokenizer").exists()
    kept = Tokenizer.from_file(str(folder / "out" / "tokens" / "tokenizer" / "tokenizer.json"))
    assert kept.get_vocab() == tokenizer.get_vocab()


def test_wrong_tokens_of_the_fast_engine_send_all_ranks_to_the_slow_one(corpus, whole, tmp_path):
    folder = job(tmp_path / "job", {"dataset": corpus})
    (folder / "slow-engine.json").write_text('{"reason": "gigatoken and tokenizers disagree on \'x\'"}')
    assert done(folder) == whole[0]
    assert json.loads((folder / "out" / "tokens" / "tokens.json").read_text())["engine"] == "tokenizers"
    assert "encoding with tokenizers: gigatoken and tokenizers disagree" in (folder / "logs" / "rank-0.log").read_text()


def test_a_tokenizer_without_end_of_document_is_refused(corpus, tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    folder = job(tmp_path / "job", {"dataset": corpus, "tokenizer": tmp_path / "tokenizer"})
    assert start(folder).wait(limit(60)) == 1
    assert said(folder)["class"] == "user"
    assert "no end-of-document token" in said(folder)["message"]


def test_a_bad_line_is_named_and_nothing_is_published(tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "a.jsonl").write_bytes(lines(range(20)) + b'{"text": 7}\n')
    folder = job(tmp_path / "job", {"dataset": tmp_path / "dataset"})
    assert start(folder).wait(limit(60)) == 1
    assert said(folder)["class"] == "user"
    assert "a.jsonl:21: no text in field 'text'" in said(folder)["message"]
    assert not (folder / "result.json").exists()


def test_a_split_without_documents_names_the_setting(tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "a.jsonl").write_bytes(lines(range(3)))
    tiny = CONFIG.model_copy(update={"heldout_fraction": 1e-9})
    folder = job(tmp_path / "job", {"dataset": tmp_path / "dataset"}, tiny)
    assert start(folder).wait(limit(60)) == 1
    assert "the heldout split has no documents: preprocessing.heldout_fraction" in said(folder)["message"]


def test_the_tokenizers_sample_depends_on_the_documents_and_not_on_their_shards(corpus, tmp_path):
    def drawn(units):
        return sorted(sample(units, CONFIG))

    cut_coarse, cut_fine = cut(find_shards([corpus])), cut(find_shards([corpus]), 100_000)
    found = drawn(cut_coarse)
    assert drawn(cut_fine) == found
    assert 100_000 < sum(map(len, found)) < 400_000
    assert not any(split_of(document, (0.8, 0.2)) for document in found)
