"""Openings of a corpus: short, of several documents, and never most of one."""

import json

import pytest

from tasks.data.corpus.openings import openings, openings_of

pytestmark = pytest.mark.unit


def test_openings_are_short_and_differ_and_give_away_half_a_document_at_most():
    prose = "It was the best of times, it was the worst of times, it was the age of wisdom.\nIt was"
    documents = [
        "",
        " \n",
        "a",
        "import os\n\nprint(os.name)\n",
        prose,
        prose.upper(),
        prose,
        "好" * 100,
        "never reached" * 9,
    ]
    assert openings(documents) == [
        "import os",
        "It was the best of times, it was the",
        "IT WAS THE BEST OF TIMES, IT WAS THE",
    ]
    assert openings(["好" * 100, "one line of few words"]) == ["好" * 40, "one line"]


def test_openings_are_read_from_files_and_folders_and_what_cannot_be_read_has_none(tmp_path):
    (tmp_path / "a.txt").write_text("It was a dark and stormy night; the rain fell in torrents.")
    (tmp_path / "picture.png").write_bytes(bytes(range(128, 256)))
    lines = [json.dumps({"text": f"Chapter {number} of a long and winding book"}) for number in range(9)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert openings_of(tmp_path, "text", 3) == [
        "It was a dark and stormy",
        "Chapter 0 of a",
        "Chapter 1 of a",
    ]
    assert openings_of(tmp_path / "b.jsonl", "content", 3) == [] == openings_of(tmp_path / "nothing", "text", 3)
