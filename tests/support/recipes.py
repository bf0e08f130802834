"""A recipe of CONTRIBUTING.md, followed to the letter in a copy of the product."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("flows", "tasks", "deployments", "docs", "pyproject.toml")


def steps_of(heading: str) -> list[list[str]]:
    """The files that each step of a recipe begins with, before its colon; of steps for people (tests, scripts) none."""
    text = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    heads = re.findall(r"^\d+\. (.*?):", text, re.MULTILINE | re.DOTALL)
    named = [re.findall(r"`((?:tasks|deployments|docs)/[\w/.]+|pyproject\.toml)`", head) for head in heads]
    return [files for files in named if files]


class Copy:
    """A copy of the product, with its bytecode, that recipes are tried in, and that is as before after each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._before = folder, dict[Path, str | None]()
        for name in COPIED:
            source, ignored = ROOT / name, shutil.ignore_patterns("*.pyc.*", "images", "proof")
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy(source, folder / name)

    def follow(
        self, files: list[str], name: str, texts: dict[str, str], edits: dict[str, list[tuple[str, str]]]
    ) -> None:
        """Write the files that recipe steps name: new ones whole, existing ones by replacing texts that must be in them."""
        for file in files:
            path = self.folder / file.replace("NAME", name)
            self._before[path] = path.read_text(encoding="utf-8") if path.exists() else None
            path.parent.mkdir(exist_ok=True)
            if file in texts:
                (path.parent / "__init__.py").touch()
                path.write_text(texts[file], encoding="utf-8")
                continue
            text = path.read_text(encoding="utf-8")
            for old, new in edits[file]:
                assert text.count(old) == 1, f"{file}: {old}"
                text = text.replace(old, new)
            path.write_text(text, encoding="utf-8")

    def undo(self) -> None:
        for path, text in self._before.items():
            path.unlink() if text is None else path.write_text(text, encoding="utf-8")
        self._before = {}

    def problems(self, program: str, *arguments: str) -> str:
        """What a program says that runs on the copy alone; empty when all is well."""
        command = [sys.executable, "-B", "-c", program, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment(self.folder), capture_output=True, text=True)
        return done.stdout.strip() + (done.stderr[-2000:] if done.returncode else "")


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(folder),
        "HOME": str(folder),
        "HEADWAY_HOME": str(folder / "home"),
    }
