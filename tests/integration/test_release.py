"""A release is made of a commit alone, of a tree that is ready for it, and the same commit makes the same files."""

import hashlib
import re
import shutil
import subprocess
import zipfile

import pytest

from benchmarks import release

ROOT = release.ROOT


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A small repository with what a release reads, at 0.1.0."""
    folder = tmp_path / "tree"
    for name in ("flows", "tasks", "deployments"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    for name in ("README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        re.sub(r'^version = ".*"$', 'version = "0.1.0"', project, flags=re.MULTILINE)
    )
    (folder / "image.txt").write_text("headway/cluster:0.1.0, and not 10.1.0 or 0.1.01\n")
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- A page.\n\n## [0.1.0] - 2026-01-01\n\n- All.\n"
    )
    (folder / "docs").mkdir()
    (folder / "docs" / "upgrade.md").write_text(
        "## From 0.0.9 to 0.1.0\n\nNothing.\n\n## From 0.1.0 to 0.2.0\n\nNothing.\n"
    )
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a")
    return folder


def prepared(tree):
    changed = release.prepare(tree, "0.2.0", today="2026-12-01")
    git(tree, "commit", "-qam", "0.2.0")
    return {path.name for path in changed}


def test_the_version_is_written_wherever_it_stands_and_nowhere_else(tree):
    assert prepared(tree) == {"pyproject.toml", "image.txt", "CHANGELOG.md"}
    assert (tree / "image.txt").read_text() == "headway/cluster:0.2.0, and not 10.1.0 or 0.1.01\n"
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n- A page.\n" in (tree / "CHANGELOG.md").read_text()
    assert release.notes(tree, "0.2.0") == "- A page." and release.notes(tree, "Unreleased") == ""
    assert release.obstacles(tree) == []


@pytest.mark.parametrize(
    ("version", "problem"),
    [("0.1.0", "does not come after 0.1.0"), ("0.0.9", "does not come after"), ("next", "is no version")],
)
def test_a_version_that_does_not_come_next_is_refused_and_nothing_is_changed(tree, version, problem):
    with pytest.raises(ValueError, match=problem):
        release.prepare(tree, version, today="2026-12-01")
    assert git(tree, "status", "--porcelain") == ""


def test_a_release_without_anything_to_tell_is_refused(tree):
    prepared(tree)
    with pytest.raises(ValueError, match="nothing under"):
        release.prepare(tree, "0.3.0", today="2026-12-02")


def test_a_tree_that_is_not_ready_is_named(tree):
    assert release.obstacles(tree) == []
    text = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(text.replace('version = "0.1.0"', 'version = "0.1.1"'))
    assert [line for line in release.obstacles(tree) if "no dated section [0.1.1]" in line]
    git(tree, "checkout", "-q", "pyproject.toml")
    prepared(tree)
    git(tree, "tag", "v0.2.0")
    (tree / "image.txt").write_text("changed")
    assert [line for line in release.obstacles(tree) if "image.txt" in line]
    (tree / "docs" / "upgrade.md").write_text("## From 0.0.9 to 0.1.0\n\nNothing.\n")
    git(tree, "commit", "-qam", "later")
    assert [line for line in release.obstacles(tree) if "v0.2.0 is another commit" in line]
    assert [line for line in release.obstacles(tree) if "no section `From ... to 0.2.0`" in line]


@pytest.mark.long
def test_the_same_commit_makes_the_same_files(tree, tmp_path):
    prepared(tree)
    made = {path.name: path.read_bytes() for path in release.build(tree, tmp_path / "one")}
    (tree / "flows" / "stray.py").write_text("")  # not committed
    again = {path.name: path.read_bytes() for path in release.build(tree, tmp_path / "two")}
    assert made == again
    (wheel,) = (name for name in made if name.endswith(".whl"))
    assert wheel == "headway-0.2.0-py3-none-any.whl"
    assert "flows/stray.py" not in zipfile.ZipFile(tmp_path / "two" / wheel).namelist()
    assert "headway-0.2.0-train.cdx.json" in made and b"- A page." in made["notes.md"]
    sums = dict(line.split("  ")[::-1] for line in made["SHA256SUMS"].decode().splitlines())
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in made.items() if name != "SHA256SUMS"}


def test_the_changelog_of_this_tree_can_be_cut():
    assert len(release.notes(ROOT, "Unreleased").splitlines()) > 3 or release.notes(ROOT, release.version_of(ROOT))
    assert ROOT / "docker" / "compose.yaml" in release.naming(ROOT, release.version_of(ROOT))
