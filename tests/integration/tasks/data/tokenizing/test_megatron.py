"""The same bytes as Megatron's own script, by its digests and, where MEGATRON_LM names a checkout, by running it."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from token_material import KINDS, documents, make_tokenizer, write_documents

from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Work

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("source") / "awkward.jsonl")


@pytest.fixture(scope="module")
def written(tmp_path_factory, source):
    """Our output by kind of tokenizer, each written once."""
    made = {}

    def write(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            tokenizer = open_tokenizer(make_tokenizer(kind, folder / "tokenizer"))
            done = preprocess(plan([source], Work(tokenizer), prefix=folder / "out"), workers=2)
            assert done.engine == "gigatoken", done.reason
            made[kind] = folder
        return made[kind]

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_of_megatrons_script(kind, source, written):
    folder = written(kind)
    wanted = GOLDEN[kind]
    said = "was made of other bytes: run make_golden.py again"
    assert _digest(source) == wanted["input"], f"golden.json {said}"
    assert _digest(folder / "tokenizer" / "tokenizer.json") == wanted["tokenizer"], f"golden.json {said}"
    assert _digest(folder / "out_text_document.bin") == wanted["bin"]
    assert _digest(folder / "out_text_document.idx") == wanted["idx"]


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("kind", KINDS)
def test_megatrons_script_run_here_writes_the_same_bytes(kind, source, written, tmp_path):
    folder = written(kind)
    python = os.environ.get("MEGATRON_PYTHON", "python")
    _golden_script().run_megatron(
        Path(os.environ["MEGATRON_LM"]), source, folder / "tokenizer", prefix=tmp_path / "theirs", python=python
    )
    for end in ("bin", "idx"):
        theirs = (tmp_path / f"theirs_text_document.{end}").read_bytes()
        assert theirs == (folder / f"out_text_document.{end}").read_bytes()


def test_megatron_core_reads_documents_and_sequences(written):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    folder = written("pieces")
    theirs = IndexedDataset(str(folder / "out_text_document"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    texts = documents()
    assert len(theirs.document_indices) == len(texts) + 1
    assert len(theirs) == len(texts), "every document has a first token, so each is a sequence"
    end = tokenizer.token_to_id("</s>")
    for number in (*range(17), 18, 400, len(texts) - 1):
        assert np.array_equal(theirs[number], [*tokenizer.encode(texts[number]).ids, end])


def test_an_empty_document_is_a_mark_without_a_sequence(written):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs = IndexedDataset(str(written("gpt2") / "out_text_document"))
    texts = documents()
    empty = [number for number, text in enumerate(texts) if not text]
    assert len(theirs) == len(texts) - len(empty)
    marks = theirs.document_indices
    assert [number for number in range(len(texts)) if marks[number] == marks[number + 1]] == empty


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _golden_script():
    spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
