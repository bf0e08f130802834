"""What MkDocs does for mkdocs.yml beyond its own: pages that lie at the root of the repository, and links out of docs/.

A page links to files as they lie in the repository. The site has the pages alone, so a link to a source file leads to the
repository's address where one is configured, and is plain text otherwise. A link to a file that is not there fails the build.
Where a page names another by its file (`[azureml.md](azureml.md)`), the site has the other's heading.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
AT_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`\n]+`)"
    r"|\[(?P<text>[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\((?P<to>(?!https?:|mailto:|#)[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, *, config: Any) -> Files:
    for name in AT_THE_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def named(text: str, path: Path) -> str:
    """What a link to a page says: a file's name becomes the page's heading, without what follows a colon."""
    if not re.fullmatch(r"[\w./-]+\.md", text) or not path.is_file():
        return text
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1].partition(":")[0] if heading else text


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    folder = "" if source in AT_THE_ROOT else posixpath.join("docs", posixpath.dirname(source))

    def link(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        path, _, anchor = match["to"].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if (target.startswith("docs/") and not (ROOT / target).is_dir()) or target in AT_THE_ROOT:
            uri = target.removeprefix("docs/")
            place = posixpath.relpath(uri, posixpath.dirname(source) or ".")
            return f"[{named(match['text'], ROOT / target)}]({place}{'#' + anchor if anchor else ''})"
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which is not in the repository", source, match["to"])
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return (
            f"[{match['text']}]({config.repo_url.rstrip('/')}/{kind}/main/{target})"
            if config.repo_url
            else match["text"]
        )

    return LINK.sub(link, markdown)
