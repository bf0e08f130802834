"""Cuts a release, and pushes nothing.

    python -m benchmarks.release prepare 0.2.0
    make release [ARGS=--images]

`prepare` writes the version wherever it stands and dates what CHANGELOG.md has under *Unreleased*; look at the change and commit
it. `build`, which `make release` calls after `make check`, refuses a tree that is not what a release may be made of, and then
writes the wheel, an SBOM of each extra but `dev`, the notes and SHA256SUMS to build/release/VERSION; `--images` builds the images
too. Files come from the commit, not from the working directory, and their times are the commit's: one commit makes one
wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

from packaging.version import InvalidVersion, Version

from benchmarks.supply import PROJECT, bill

ROOT = Path(__file__).parents[1]
HISTORY = ("CHANGELOG.md", "constraints.txt", "docs/upgrade.md", "tests/integration/test_release.py")
"""Files that name versions of other packages or of earlier releases, or made-up ones, and keep them."""


def git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout


def version_of(root: Path) -> str:
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.*)"$', text, re.MULTILINE)[1]


def naming(root: Path, version: str) -> list[Path]:
    """Every tracked text that names the version."""
    name = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])".encode())
    listed = (root / path for path in git(root, "ls-files", "-z").decode().split("\0") if path and path not in HISTORY)
    return [
        path for path in listed if path.is_file() and b"\0" not in (data := path.read_bytes()) and name.search(data)
    ]


def notes(root: Path, version: str) -> str:
    """What CHANGELOG.md has about a version, without its heading; empty when it has nothing."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def prepare(root: Path, version: str, *, today: str) -> list[Path]:
    """Write the new version into every file that names the old one; returns them."""
    old = version_of(root)
    try:
        later = Version(version) > Version(old)
    except InvalidVersion:
        raise ValueError(f"{version} is no version: write MAJOR.MINOR.PATCH, such as 0.2.0") from None
    if not later:
        raise ValueError(f"{version} does not come after {old}, the version of pyproject.toml")
    if not notes(root, "Unreleased"):
        raise ValueError("CHANGELOG.md has nothing under [Unreleased]: write what users will notice, and prepare again")
    changed = naming(root, old)
    for path in changed:
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d.])", version, text), encoding="utf-8")
    log = root / "CHANGELOG.md"
    dated = f"## [Unreleased]\n\n## [{version}] - {today}"
    log.write_text(log.read_text(encoding="utf-8").replace("## [Unreleased]", dated, 1), encoding="utf-8")
    return [*changed, log]


def obstacles(root: Path) -> list[str]:
    """Why no release can be made of this tree: each with its remedy."""
    version, wrong = version_of(root), []
    if changed := git(root, "status", "--porcelain").decode().splitlines():
        wrong.append(
            f"{len(changed)} files are not as they are committed ({changed[0].strip()}): commit or remove them"
        )
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        wrong.append(f"CHANGELOG.md has no dated section [{version}]: python -m benchmarks.release prepare VERSION")
    elif not notes(root, version):
        wrong.append(f"CHANGELOG.md has nothing under [{version}]")
    if not re.search(rf"^## .* to {re.escape(version)}$", (root / "docs" / "upgrade.md").read_text(), re.MULTILINE):
        wrong.append(
            f"docs/upgrade.md has no section `From ... to {version}`: write what becomes of a home of the release before"
        )
    tagged = git(root, "tag", "--list", f"v{version}").decode().strip()
    if tagged and git(root, "rev-list", "-1", tagged) != git(root, "rev-parse", "HEAD"):
        wrong.append(f"the tag {tagged} is another commit: a version is released once")
    return wrong


def build(root: Path, folder: Path) -> list[Path]:
    """Write the files of the release; returns them."""
    version = version_of(root)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    moment = git(root, "show", "-s", "--format=%ct", "HEAD").decode().strip()
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(fileobj=BytesIO(git(root, "archive", "HEAD"))) as committed:
            committed.extractall(place, filter="data")
        words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), place]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": moment}
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=environment)
        pins = (Path(place) / "constraints.txt").read_text(encoding="utf-8")
    versions = dict(line.split("==") for line in pins.split())
    for extra in PROJECT["optional-dependencies"].keys() - {"dev"}:  # runs the tests of a checkout
        text = json.dumps(bill(extra, versions), indent=1)
        (folder / f"headway-{version}-{extra}.cdx.json").write_text(text + "\n", encoding="utf-8")
    text = f"# Headway {version}\n\nHow to upgrade: docs/upgrade.md.\n\n{notes(root, version)}\n"
    (folder / "notes.md").write_text(text, encoding="utf-8")
    made = sorted(folder.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return [*made, folder / "SHA256SUMS"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    below = parser.add_subparsers(dest="what", required=True)
    below.add_parser("prepare").add_argument("version", help="of the release, such as 0.2.0")
    below.add_parser("build").add_argument("--images", action="store_true", help="build the images of docker/ too")
    given = parser.parse_args()
    if given.what == "prepare":
        try:
            changed = prepare(ROOT, given.version, today=datetime.now(UTC).date().isoformat())
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(*(path.relative_to(ROOT) for path in changed), "Look at the change, and commit it.", sep="\n")
        return 0
    if wrong := obstacles(ROOT):
        print("No release can be made of this tree:", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    version = version_of(ROOT)
    print(*build(ROOT, ROOT / "build" / "release" / version), sep="\n")
    if given.images:
        subprocess.run([sys.executable, "-m", "benchmarks.images"], cwd=ROOT, check=True)
    print(
        f"Nothing was pushed. What is left to a person: git tag -s v{version} && git push origin v{version}, and the images."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
