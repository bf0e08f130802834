"""Megatron's token files: written, read, and refused when broken."""

import struct

import numpy as np
import pytest

from tasks.common.errors import IntegrityError
from tasks.formats.mmididx import TokenWriter, open_tokens

pytestmark = pytest.mark.unit

DOCUMENTS = [[1, 2, 3], [], [65_498], [7] * 10]


def token_files(prefix, documents=DOCUMENTS, vocab_size=65_499):
    writer = TokenWriter(prefix, vocab_size)
    for document in documents:
        writer.add_document(document)
    return writer.close()


def test_tokens_come_back_with_their_documents(tmp_path):
    assert token_files(tmp_path / "t") == (4, 14)
    found = open_tokens(tmp_path / "t")
    assert found.tokens.dtype == np.uint16
    assert found.document_count == 4
    edges = found.boundaries
    documents = [found.tokens[edges[n] : edges[n + 1]].tolist() for n in range(4)]
    assert documents == DOCUMENTS


def test_the_index_is_megatrons_byte_for_byte(tmp_path):
    """The layout, written out by hand after indexed_dataset.py: an empty document has no sequence."""
    token_files(tmp_path / "t", [[1, 2], [], [3]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<4q", 0, 1, 1, 2)
    assert (tmp_path / "t.idx").read_bytes() == expected
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (200_000, np.int32)])
def test_the_width_of_a_token_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    token_files(tmp_path / "t", [[0, vocab_size - 1]], vocab_size)
    found = open_tokens(tmp_path / "t")
    assert found.tokens.dtype == dtype
    assert found.tokens.tolist() == [0, vocab_size - 1]


def test_a_token_that_does_not_fit_is_not_written(tmp_path):
    writer = TokenWriter(tmp_path / "t", 512)
    with pytest.raises(OverflowError):
        writer.add_document([70_000])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_no_tokens_at_all_can_be_opened(tmp_path, documents):
    token_files(tmp_path / "t", documents)
    found = open_tokens(tmp_path / "t")
    assert (found.document_count, len(found.tokens)) == (len(documents), 0)


def test_a_killed_writer_leaves_nothing_to_open(tmp_path):
    TokenWriter(tmp_path / "t", 512).add_document([1, 2])
    with pytest.raises(FileNotFoundError):
        open_tokens(tmp_path / "t")


def patched(offset, data):
    def change(prefix):
        path = prefix.with_suffix(".idx")
        index = bytearray(path.read_bytes())
        index[offset : offset + len(data)] = data
        path.write_bytes(index)

    return change


def cut(suffix, size):
    def change(prefix):
        path = prefix.with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:size])

    return change


def grown(prefix):
    with open(prefix.with_suffix(".bin"), "ab") as file:
        file.write(b"\0\0")


HEADER, SEQUENCES = 34, 3
POINTERS = HEADER + 4 * SEQUENCES
MARKS = HEADER + 12 * SEQUENCES
INDEX_DAMAGES = {
    "an empty index": (cut(".idx", 0), "is truncated: 0 bytes"),
    "half a header": (cut(".idx", 20), "is truncated: 20 bytes"),
    "an index without its end": (cut(".idx", -8), "need others"),
    "wrong magic": (patched(0, b"X"), "no Megatron index: magic b'XMIDIDX"),
    "another version": (patched(9, struct.pack("<Q", 2)), "no Megatron index"),
    "an unknown type": (patched(17, b"\x63"), "dtype code 99"),
    "a type of another width": (patched(17, b"\x04"), r"\.bin has 28 bytes, its index says 56"),
    "more sequences than there are": (patched(18, struct.pack("<Q", 2**60)), "need others"),
    "tokens without their end": (cut(".bin", -2), r"\.bin has 26 bytes, its index says 28"),
    "no tokens": (cut(".bin", 0), r"\.bin has 0 bytes"),
    "tokens too many": (grown, r"\.bin has 30 bytes"),
    "a pointer elsewhere": (patched(POINTERS + 8, struct.pack("<q", 4)), "a pointer is not the sum"),
    "a negative pointer": (patched(POINTERS, struct.pack("<q", -2)), "a pointer is not the sum"),
    "another length": (patched(HEADER, struct.pack("<i", 4)), r"its index says 30"),
    "a negative length": (
        lambda prefix: [
            patched(HEADER, struct.pack("<3i", 5, -1, 10))(prefix),
            patched(POINTERS, struct.pack("<3q", 0, 10, 8))(prefix),
        ],
        "a length is negative",
    ),
    "marks that do not begin at 0": (patched(MARKS, struct.pack("<q", 1)), "do not run from 0"),
    "marks that do not end at the end": (patched(MARKS + 8 * 4, struct.pack("<q", 2)), "do not run from 0 to 3"),
    "marks that go back": (patched(MARKS + 8, struct.pack("<q", 3)), "do not run from 0"),
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_damaged_token_files_are_refused(tmp_path, name):
    token_files(tmp_path / "t")
    damage, said = INDEX_DAMAGES[name]
    damage(tmp_path / "t")
    with pytest.raises(IntegrityError, match=said):
        open_tokens(tmp_path / "t")
