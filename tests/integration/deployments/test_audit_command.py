"""`headway audit-log`: what it lists, what --verify says of a log that was touched, and who read what."""

import json
import subprocess

import pytest
from support import HEADWAY, Home

from tasks.security.audit_chain import hash_of


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A home with one dataset that was published twice, and verified."""
    folder = tmp_path_factory.mktemp("audit")
    (folder / "files").mkdir()
    (folder / "files" / "one.py").write_text("print(1)\n")
    made = Home(folder / "home")
    made.ok("dataset", "publish", "tiny", folder / "files")
    (folder / "files" / "two.py").write_text("print(2)\n")
    made.ok("dataset", "publish", "tiny", folder / "files")
    made.ok("verify", "dataset/tiny")
    return made


@pytest.fixture
def mended(desk):
    """The same home; what a test changes in its documents is put back."""
    documents = desk.path / "store" / "documents"
    before = {path: path.read_bytes() for path in documents.rglob("*.json")}
    yield documents
    for path in documents.rglob("*.json"):
        path.unlink()
    for path, data in before.items():
        path.write_bytes(data)


def in_words(desk, *words):
    ran = subprocess.run([HEADWAY, "audit-log", *words], env=desk.environment(), capture_output=True, text=True)
    return ran.returncode, ran.stdout, ran.stderr


def test_entries_say_who_did_what_when_from_where_and_what_was_before(desk):
    newest, first = desk.ok("audit-log").said["entries"]
    assert (newest["number"], first["number"]) == (2, 1)
    assert newest["before"] == first["after"] and first["before"] is None
    assert newest["host"] and newest["account"] and newest["who"] and newest["time"].startswith("20")
    assert desk.ok("audit-log", "--what", first["after"]).said["entries"] == [first]


def test_a_reason_forges_no_line_and_moves_no_cursor(tmp_path):
    """Each row is one line, whatever its values hold; so in the history, and in an error."""
    made = Home(tmp_path / "home")
    for number in "12":
        (tmp_path / "one.py").write_text(f"print({number})\n")
        made.ok("dataset", "publish", "tiny", tmp_path / "one.py")
    forged = "x)\n2026-01-01T00:00:00+00:00  anna  done  promote\x1b[2A\x1b[2K\r\u202e"
    made.ok("rollback", "dataset/tiny", "--reason", forged)
    shown = r"x)\n2026-01-01T00:00:00+00:00  anna  done  promote\x1b[2A\x1b[2K\r\u202e"
    for words, lines in ((("audit-log",), 3), (("artifacts", "tiny", "--history"), 4)):
        ran = subprocess.run([HEADWAY, *words], env=made.environment(), capture_output=True, text=True)
        assert shown in ran.stdout and len(ran.stdout.split("\n")) == lines + 1, ran.stdout
    ran = subprocess.run([HEADWAY, "artifacts", "\x1b[2K"], env=made.environment(), capture_output=True, text=True)
    assert ran.returncode == 2 and "\x1b" not in ran.stderr


def test_a_whole_log_is_said_to_be_whole_with_a_hash_to_write_down(desk):
    said = desk.ok("audit-log", "--verify").said
    newest = (desk.path / "store" / "documents" / "audit" / "00000002.json").read_bytes()
    assert said["head"] == hash_of(newest)
    assert (said["ok"], said["checked"], said["copied"], said["broken"]) == (True, 2, None, None)
    code, out, _ = in_words(desk, "--verify")
    assert code == 0 and said["head"] in out and "2" in out
    assert desk.run("audit-log", "--verify", "--head", said["head"][:16]).code == 0


def test_an_edited_line_ends_with_exit_code_5_and_is_named(desk, mended):
    path = mended / "audit" / "00000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "who": "nobody"}, indent=1))
    ran = desk.run("audit-log", "--verify")
    assert (ran.code, ran.said["ok"], ran.said["broken"]) == (5, False, {"number": 1, "problem": "changed"})
    assert ran.said["error"]["type"] == "IntegrityError" and ran.said["error"]["remedy"]
    code, _, err = in_words(desk, "--verify")
    assert code == 5 and "entry 1 " in err


def test_a_log_that_was_cut_off_is_named_even_when_its_head_was_set_back(desk, mended):
    known = desk.ok("audit-log", "--verify").said["head"]
    (mended / "audit" / "00000002.json").unlink()
    assert desk.run("audit-log", "--verify").said["broken"] == {"number": 2, "problem": "cut off"}
    first = hash_of((mended / "audit" / "00000001.json").read_bytes())
    (mended / "heads" / "audit.json").write_text(json.dumps({"number": 1, "hash": first}))
    assert desk.run("audit-log", "--verify").code == 0
    assert desk.run("audit-log", "--verify", "--head", known).code == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--verify", "--head", "12"), "no hash"),
        (("--head", "a" * 64), "--verify"),
        (("--verify", "--person", "anna"), "whole"),
        (("--since", "yesterday"), "2026-01-31"),
    ],
)
def test_wrong_words_are_told_with_the_right_ones(desk, words, said):
    ran = desk.run("audit-log", *words)
    assert ran.code == 2 and said in ran.said["error"]["message"]


def test_reads_are_listed_newest_first_and_are_no_entries(desk):
    size = desk.ok("verify", "dataset/tiny").said["bytes"]
    reads = desk.ok("audit-log", "--access").said["access"]
    newest = reads[0]
    assert newest["what"] == "verify" and newest["ref"].startswith("dataset/tiny@") and newest["bytes"] == size > 0
    assert newest["who"] and newest["host"] and len(reads) >= 2
    assert desk.ok("audit-log", "--access", "--person", "nobody").said["access"] == []
    assert desk.ok("audit-log", "--access", "--since", "0m").said["access"] == []
    assert len(desk.ok("audit-log").said["entries"]) == 2
    code, out, _ = in_words(desk, "--access", "--what", "verify dataset/tiny")
    assert code == 0 and out.count("dataset/tiny@") == len(reads)


def test_an_empty_home_has_an_empty_log_that_holds(tmp_path):
    here = Home(tmp_path / "home")
    assert here.ok("audit-log").said["entries"] == [] and here.ok("audit-log", "--access").said["access"] == []
    said = here.ok("audit-log", "--verify").said
    assert (said["ok"], said["checked"], said["head"]) == (True, 0, None)
