"""A dataset is looked at whole: every kind of damage is found, and the figures are those of the documents."""

import shutil
import statistics
import struct

import numpy as np
import pytest
from token_material import AWKWARD, make_tokenizer, words, write_documents

from tasks.common.errors import IntegrityError
from tasks.data.tokenizing.checking import look, require_sound
from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Work
from tasks.formats import mmididx
from tasks.formats.mmididx import HEADER, TokenWriter, open_tokens, write_index

TEXTS = [*AWKWARD, *(words(30, i) for i in range(100))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(make_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def encoded(tokenizer, tmp_path_factory):
    """The files of a dataset that is whole."""
    folder = tmp_path_factory.mktemp("encoded")
    source = write_documents(folder / "source.jsonl", TEXTS)
    preprocess(plan([source], Work(tokenizer), prefix=folder / "out"), workers=1)
    return [*folder.glob("out_text_document.*")]


@pytest.fixture
def prefix(encoded, tmp_path):
    """A copy of it, to damage."""
    for path in encoded:
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path / "out_text_document"


def test_the_figures_are_those_of_the_documents(tokenizer, prefix):
    held, lengths = look(prefix), open_tokens(prefix).lengths.tolist()
    assert (held.documents, held.sequences, held.tokens) == (len(TEXTS), len(TEXTS) - 2, sum(lengths))
    assert (held.shortest, held.longest) == (min(lengths), max(lengths))
    assert held.median == statistics.median_low(lengths)
    assert held.ends == ((tokenizer.eod, len(lengths)),)
    assert sum(held.histogram) == len(lengths)
    assert held.histogram[5] == sum(16 <= length < 32 for length in lengths)


@pytest.mark.parametrize(
    ("file", "place", "value", "said"),
    [
        ("idx", 0, b"NOTANIDX", "no Megatron index"),
        ("idx", 9, b"\x02", "no Megatron index"),
        ("idx", 17, b"\x63", "dtype code 99"),
        ("idx", 18, struct.pack("<Q", 5), "need"),
        ("idx", HEADER.size + 4, struct.pack("<i", 99), "pointer"),
        ("idx", HEADER.size + 8, struct.pack("<i", -3), "negative"),
        ("idx", HEADER.size + 12 * 115 + 8, struct.pack("<q", 10**9), "marks"),
        ("idx", -8, struct.pack("<q", 7), "marks"),
        ("bin", -2, struct.pack("<H", 1), "ends with token 1"),
    ],
)
def test_every_kind_of_damage_is_found(tokenizer, prefix, file, place, value, said):
    path = prefix.with_name(f"{prefix.name}.{file}")
    data = bytearray(path.read_bytes())
    place %= len(data)
    data[place : place + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=said):
        require_sound(prefix, tokenizer, eod=tokenizer.eod)


def test_tokens_that_no_text_encodes_to_are_found(tokenizer, prefix):
    """The first document's first token becomes one that would have been merged with the next."""
    from tokenizers import Tokenizer

    rules, path = Tokenizer.from_str(tokenizer.rules), prefix.with_name(f"{prefix.name}.bin")
    tokens = open_tokens(prefix).tokens[: open_tokens(prefix).lengths[0] - 1].tolist()
    other = next(
        token
        for token in range(1, 1500)
        if rules.encode(rules.decode([token, *tokens[1:]])).ids != [token, *tokens[1:]]
    )
    path.write_bytes(struct.pack("<H", other) + path.read_bytes()[2:])
    with pytest.raises(IntegrityError, match="does not come back"):
        require_sound(prefix, tokenizer, eod=tokenizer.eod)


@pytest.mark.parametrize(("file", "size"), [("bin", -2), ("idx", -1), ("idx", 20)])
def test_a_cut_file_is_found(tokenizer, prefix, file, size):
    path = prefix.with_name(f"{prefix.name}.{file}")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(IntegrityError, match=rf"\.{file} .*bytes"):
        require_sound(prefix, tokenizer, eod=tokenizer.eod)


def test_a_missing_bin_is_found(tokenizer, prefix):
    prefix.with_name(f"{prefix.name}.bin").unlink()
    with pytest.raises(IntegrityError, match="missing beside its index"):
        look(prefix)


def test_tokens_of_a_larger_vocabulary_are_found(prefix):
    with pytest.raises(IntegrityError, match="the vocabulary has 300"):
        look(prefix, largest=300)


def test_an_index_in_chunks_is_the_one_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(mmididx, "CHUNK", 3)
    lengths = [3, 0, 1, 0, 0, 2, 5, 4, 1, 1, 0]
    writer = TokenWriter(tmp_path / "once", 500)
    for length in lengths:
        writer.add_document(list(range(length)))
    writer.close()
    files = []
    for number, some in enumerate(([3, 0, 1, 0], [], [0, 2, 5, 4, 1, 1, 0])):
        files.append(tmp_path / f"{number}.len")
        files[-1].write_bytes(np.array(some, np.int32).tobytes())
    write_index(tmp_path / "chunks.idx", files, np.dtype(np.uint16))
    assert (tmp_path / "chunks.idx").read_bytes() == (tmp_path / "once.idx").read_bytes()
    held = look(tmp_path / "once")
    assert (held.documents, held.sequences, held.tokens) == (11, 7, 17)


def test_a_dataset_without_a_sequence_is_sound(tmp_path):
    writer = TokenWriter(tmp_path / "none", 500)
    writer.add_document([])
    writer.close()
    held = look(tmp_path / "none")
    assert (held.documents, held.sequences, held.tokens, held.median, held.samples) == (1, 0, 0, 0, ())
