"""What is looked at before files are copied into a dataset: their first lines, for text in the field that was named."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.corpus.packing import FIRST_LINES, pack

pytestmark = pytest.mark.unit

GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("a.jsonl", GOOD + b'{"text": "b"\n', "line 2: not a JSON line"),
        ("a.jsonl", GOOD + b'{"content": "b"}\n', r"line 2: no text in field 'text' \(there: content\)"),
        ("a.jsonl.gz", gzip.compress(GOOD + b"text\n", mtime=0), "line 2: not a JSON line"),
        ("a.jsonl", b'{"text": 7}\n', "line 1: no text in field 'text'"),
    ],
)
def test_a_bad_first_line_is_named_with_its_file_and_the_remedy(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}, {words}.*--text-field NAME.*validation\.text_field"):
        pack([tmp_path / name], tmp_path / "out", text_field="text")
    assert pack([tmp_path / name], tmp_path / "unread").documents == data.count(b"\n") or name.endswith(".gz")


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    pq.write_table(pa.table({"content": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, .*no column 'text' \(there: content\).*--text-field NAME"):
        pack([tmp_path / "a.parquet"], tmp_path / "out", text_field="text")
    assert pack([tmp_path / "a.parquet"], tmp_path / "out", text_field="content").documents == 2


def test_later_lines_are_left_to_validation_and_empty_files_hold_nothing_bad(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD * FIRST_LINES + b"no JSON\n")
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert pack([tmp_path], tmp_path / "out", text_field="text").documents == FIRST_LINES + 1
