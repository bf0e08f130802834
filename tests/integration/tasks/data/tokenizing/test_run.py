"""A run from files to datasets: order, splits, what is taken up again, and what is refused."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from token_material import AWKWARD, make_tokenizer, words, write_documents

from tasks.common.errors import IntegrityError, Missing
from tasks.data.corpus.inputs import find_shards
from tasks.data.tokenizing import units as units_module
from tasks.data.tokenizing.engine import Encoded, Gigatoken, choose
from tasks.data.tokenizing.merging import merge
from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.splits import Splits, split_of
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Work, encode_parallel, unit_bytes
from tasks.formats.mmididx import open_tokens

TEXTS = [*AWKWARD, *(words(200, i) for i in range(400))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(make_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("source") / "source.jsonl", TEXTS)


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(units_module, "LEAST_UNIT", 10_000)


def test_workers_and_units_leave_no_trace_in_the_bytes(tokenizer, source, tmp_path, monkeypatch):
    written = set()
    for least, workers in ((1 << 20, 1), (10_000, 1), (10_000, 3)):
        monkeypatch.setattr(units_module, "LEAST_UNIT", least)
        prefix = tmp_path / f"{least}-{workers}"
        preprocess(plan([source], Work(tokenizer), prefix=prefix), workers=workers)
        written.add(_digest(prefix))
    assert len(written) == 1


def test_documents_come_in_the_order_of_the_input_whatever_the_container(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i}" for i in range(40)]
    write_documents(tmp_path / "a.jsonl", texts[:10])
    plain = write_documents(tmp_path / "b", texts[10:20])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(pa.table({"text": texts[20:30]}), tmp_path / "c.parquet", row_group_size=3)
    (tmp_path / "d").mkdir()
    for text in texts[30:]:
        (tmp_path / "d" / f"{text}.txt").write_text(text)
    inputs = [tmp_path / "a.jsonl", str(tmp_path / "b.*gz"), tmp_path / "c.parquet", tmp_path / "d"]
    preprocess(plan(inputs, Work(tokenizer), prefix=tmp_path / "out"), workers=2)
    assert _texts(tmp_path / "out_text_document", tokenizer) == texts


def test_splits_and_fields_have_a_dataset_each(tokenizer, tmp_path):
    rows = [{"text": f"text {i}", "title": f"title {i}"} for i in range(300)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fractions = (0.8, 0.2)
    work = Work(tokenizer, ("text", "title"), Splits(fractions))
    done = preprocess(plan([tmp_path / "x.jsonl"], work, prefix=tmp_path / "out"), workers=2)
    names = [(output["split"], output["key"]) for output in done.outputs]
    assert names == [("train", "text"), ("train", "title"), ("heldout", "text"), ("heldout", "title")]
    for side, split in enumerate(("train", "heldout")):
        wanted = [row for row in rows if split_of(row["text"], fractions) == side]
        for key in ("text", "title"):
            found = _texts(tmp_path / f"out_{split}_{key}_document", tokenizer)
            assert found == [row[key] for row in wanted]


def test_the_arguments_name_the_dataset_of_each_split(tokenizer, source, tmp_path):
    """That Megatron reads such lists is shown in test_mixture.py."""
    done = preprocess(plan([source], Work(tokenizer, splits=Splits((0.7, 0.3))), prefix=tmp_path / "out"), workers=1)
    assert done.arguments[0] == "--per-split-data-args-path"
    file = json.loads(Path(done.arguments[1]).read_text())
    assert file["train"] == [str(tmp_path / "out_train_text_document")]
    assert file["valid"] == [str(tmp_path / "out_heldout_text_document")]
    assert file["test"] is None
    done = preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "one"), workers=1)
    assert done.arguments == ("--data-path", str(tmp_path / "one_text_document"))


def test_nothing_is_left_beside_the_output(tokenizer, source, tmp_path):
    preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "out"), workers=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.preprocess.json", "out_text_document.bin", "out_text_document.idx"]


def test_the_same_work_is_not_done_twice_and_other_output_is_refused(tokenizer, source, tmp_path):
    wanted = plan([source], Work(tokenizer), prefix=tmp_path / "out")
    first = preprocess(wanted, workers=1)
    before = (tmp_path / "out_text_document.bin").stat().st_mtime_ns
    again = preprocess(wanted, workers=1)
    assert again.outputs == first.outputs and again.resumed == again.units
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before
    other = plan([source], Work(tokenizer, append_eod=False), prefix=tmp_path / "out")
    with pytest.raises(ValueError, match=r"out_text_document\.bin is there.*--overwrite"):
        preprocess(other, workers=1)
    assert (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before
    assert preprocess(other, workers=1, overwrite=True).outputs != first.outputs
    assert not (tmp_path / "out.parts").exists()


def test_output_that_was_cut_is_made_again(tokenizer, source, tmp_path):
    wanted = plan([source], Work(tokenizer), prefix=tmp_path / "out")
    preprocess(wanted, workers=1)
    before = _digest(tmp_path / "out")
    os.truncate(tmp_path / "out_text_document.bin", 10)
    preprocess(wanted, workers=1)
    assert _digest(tmp_path / "out") == before


def test_ranks_encode_their_share_and_one_merges(tokenizer, source, tmp_path, small_units):
    """As a job of several nodes does: no process but the ranks, a folder that all of them see."""
    whole = plan([source], Work(tokenizer), prefix=tmp_path / "whole")
    preprocess(whole, workers=1)
    job = plan([source], Work(tokenizer), prefix=tmp_path / "job")
    assert len(job.units) > 9
    engine = choose(tokenizer, []).engine
    for rank in (2, 0):
        encode_parallel(job.units[rank::3], job.work, job.parts, engine=engine, workers=1)
    with pytest.raises(IntegrityError, match="no whole part of"):
        merge(job.units, job.work, job.parts, prefix=job.prefix)
    assert encode_parallel(job.units[1::3], job.work, job.parts, engine=engine, workers=2) == 0
    (output,) = merge(job.units, job.work, job.parts, prefix=job.prefix)
    for end in (".bin", ".idx"):
        assert (job.parts / f"out-0{end}").read_bytes() == Path(f"{whole.prefix}_text_document{end}").read_bytes()
    assert output.counts.documents == len(TEXTS)


def test_a_part_without_a_sound_receipt_is_made_again(tokenizer, source, tmp_path, small_units):
    """A part that was cut, no receipt, half a receipt, lengths of another size."""
    job = plan([source], Work(tokenizer), prefix=tmp_path / "job")
    engine = Gigatoken(tokenizer)
    encode_parallel(job.units, job.work, job.parts, engine=engine, workers=1)
    cut, without, half, other = (units_module.unit_key(unit, job.work) for unit in job.units[3:7])
    os.truncate(job.parts / f"{cut}.0.bin", 8)
    (job.parts / f"{without}.json").unlink()
    os.truncate(job.parts / f"{half}.json", 30)
    (job.parts / f"{other}.0.len").write_bytes(b"")
    done = preprocess(job, workers=1)
    assert (done.resumed, done.units) == (len(job.units) - 4, len(job.units))


def test_what_changes_the_bytes_changes_the_parts_names(tokenizer, source, tmp_path):
    work = Work(tokenizer)
    shards = find_shards([source])
    (unit,) = plan([source], work, prefix=tmp_path / "x").units
    keys = {units_module.unit_key(unit, each) for each in (work, Work(tokenizer, append_eod=False))}
    keys |= {
        units_module.unit_key(unit, each)
        for each in (Work(tokenizer, ("t",)), Work(tokenizer, splits=Splits((0.9, 0.1))))
    }
    os.utime(source, ns=(1, shards[0].modified + 1))
    keys.add(units_module.unit_key(plan([source], work, prefix=tmp_path / "x").units[0], work))
    assert len(keys) == 5


def test_units_are_many_enough_for_many_workers_and_few_enough_to_keep():
    class Sized:
        def __init__(self, size):
            self.size = size

    assert unit_bytes([Sized(33_000_000)]) * 16 <= 33_000_000
    assert unit_bytes([Sized(10**12)]) == 64 << 20
    assert unit_bytes([Sized(10**12)] * 100) == 10**14 // 32_768, "more names than a folder and a store can hold"
    assert unit_bytes([Sized(10)]) >= 1 << 20


def test_killed_in_the_middle_and_started_again_only_the_rest_is_done(tokenizer, tmp_path):
    """SIGKILL at about 60 % of many small units: the second start does the others, and the bytes are the same."""
    source = write_documents(tmp_path / "big.jsonl", [words(3000, i % 50) + str(i) for i in range(600)])
    folder = make_tokenizer("bytes", tmp_path / "tokenizer")
    whole = _run(source, folder, tmp_path / "whole").wait()
    assert whole == 0
    for attempt in range(5):
        prefix = tmp_path / f"killed{attempt}"
        running = _run(source, folder, prefix)
        parts = Path(f"{prefix}.parts")
        while running.poll() is None and len(list(parts.glob("*.json"))) < 60:
            time.sleep(0.001)
        running.kill()
        running.wait()
        if 0 < (ready := len(list(parts.glob("*.json")))) < 100 and not Path(f"{prefix}_text_document.bin").exists():
            break
    else:
        pytest.fail("five runs were over before they could be killed")
    second = _run(source, folder, prefix)
    assert second.wait() == 0
    said = json.loads(second.stdout.read())
    assert said["units"] > 90
    assert ready <= said["resumed"] < said["units"]
    assert _digest(prefix) == _digest(tmp_path / "whole")


def test_a_worker_that_is_killed_is_told_and_its_unit_done_later(tokenizer, source, tmp_path, small_units):
    class Deadly(Gigatoken):
        def encode(self, texts):
            os.kill(os.getpid(), 9)

    job = plan([source], Work(tokenizer), prefix=tmp_path / "job")
    with pytest.raises(Missing, match="by signal 9"):
        encode_parallel(job.units, job.work, job.parts, engine=Deadly(tokenizer), workers=2)
    assert preprocess(job, workers=2).resumed == 0


def test_an_engine_that_errs_on_a_later_document_is_not_believed(tokenizer, source, tmp_path, small_units, monkeypatch):
    """The first documents agree, a unit further on does not: all of it is encoded by the other one."""
    encode = Gigatoken.encode

    def errs(self, texts):
        found = encode(self, texts)
        return Encoded(found.tokens + 1, found.lengths) if TEXTS[-1] in texts else found

    preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "right"), workers=1)
    monkeypatch.setattr(Gigatoken, "encode", errs)
    done = preprocess(plan([source], Work(tokenizer), prefix=tmp_path / "out"), workers=2)
    assert done.engine == "tokenizers" and "disagree" in done.reason and done.resumed == 0
    assert _digest(tmp_path / "out") == _digest(tmp_path / "right")


def test_two_runs_on_one_prefix_are_refused(tokenizer, source, tmp_path):
    job = plan([source], Work(tokenizer), prefix=tmp_path / "job")
    refused = []

    def second(read):
        if not refused:
            with pytest.raises(ValueError, match="another process writes") as raised:
                preprocess(job, workers=1)
            refused.append(raised)

    preprocess(job, workers=1, report=second)
    assert refused


def _run(source, folder, prefix):
    code = f"""
import json, tasks.data.tokenizing.units as units
from pathlib import Path
from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.tokenizer import open_tokenizer
units.LEAST_UNIT = {source.stat().st_size // 100}
work = units.Work(open_tokenizer({str(folder)!r}))
done = preprocess(plan([{str(source)!r}], work, prefix=Path({str(prefix)!r})), workers=2)
print(json.dumps({{"units": done.units, "resumed": done.resumed}}))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def _digest(prefix):
    return hashlib.sha256(
        b"".join(Path(f"{prefix}_text_document{end}").read_bytes() for end in (".bin", ".idx"))
    ).hexdigest()


def _texts(prefix, tokenizer):
    from tokenizers import Tokenizer

    decoder, opened = Tokenizer.from_str(tokenizer.rules), open_tokens(prefix)
    bounds = opened.boundaries
    return [decoder.decode(opened.tokens[a:b], skip_special_tokens=True) for a, b in pairwise(bounds)]
