"""Files of a home that nobody else may read: whole or not there, whoever writes them at once, and whatever fails."""

import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tasks.common.process import append, private_folder, secret, whole

pytestmark = pytest.mark.unit


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "below" / "file"
    with whole(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(OSError, match="full"), whole(path) as file:
        file.write(b"half")
        raise OSError("the disk is full")
    assert path.read_bytes() == b"old" and mode(path) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_the_first_of_several_writers_wins(tmp_path):
    path = tmp_path / "file"
    with whole(path, replace=False) as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), whole(path, replace=False) as file:
        file.write(b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_secret_is_the_same_for_all_that_ask_at_once(tmp_path):
    path, made = tmp_path / "own" / "secret", count()
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: secret(path, lambda: f"secret {next(made)}"), range(32)))
    assert secrets == {path.read_text()}
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_what_several_append_does_not_mix(tmp_path):
    path, lines = tmp_path / "log", [f"{number} " * 500 + "\n" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda line: append(path, line.encode(), durable=line.startswith("1 ")), lines))
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines) and mode(path) == 0o600


def test_a_folder_that_is_there_keeps_the_rights_that_somebody_gave_it(tmp_path):
    assert mode(private_folder(tmp_path / "new")) == 0o700
    Path(tmp_path / "new").chmod(0o750)
    assert mode(private_folder(tmp_path / "new")) == 0o750
