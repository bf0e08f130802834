"""The site of docs/ is complete, reads as the pages do on GitHub, works without a network, and its search finds."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import browser
import pytest
from markdown_it import MarkdownIt
from waiting import limit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AT_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
LINES = 300
"""Most lines of a page."""
STRUCTURE = re.compile(r"<(h[1-6]|ul|ol|li|table|tr|td|th|pre|img|blockquote)\b")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built strictly: a page that no menu has, a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert built.returncode == 0, built.stderr
    return folder


def pages():
    return [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in AT_THE_ROOT)]


def article(site, page):
    place = page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).with_suffix(".html")
    text = (site / place).read_text(encoding="utf-8")
    return re.search(r"<article.*?>(.*?)</article>", text, re.DOTALL)[1]


def test_every_page_has_the_parts_that_it_has_on_github(site):
    """Python-Markdown wants blank lines and deeper indents where GitHub does not, and else makes a list one paragraph."""
    github, wrong = MarkdownIt("commonmark").enable("table"), {}
    for page in pages():
        wanted = Counter(STRUCTURE.findall(github.render(page.read_text(encoding="utf-8"))))
        made = Counter(STRUCTURE.findall(article(site, page)))
        if made != wanted:
            wrong[page.name] = {tag: (wanted[tag], made[tag]) for tag in wanted | made if wanted[tag] != made[tag]}
    assert wrong == {}


def test_no_page_brings_anything_from_elsewhere(site):
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\ssrc="([^"]*)"|<link\b[^>]*\shref="([^"]*)"|url\(([^)]*)\)"""
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    brought = {
        next(filter(None, found), "") for path in files for found in loaded.findall(path.read_text(encoding="utf-8"))
    }
    assert len(files) > 60 and [address for address in brought if re.match(r"['\"]?(https?:)?//", address)] == []


def test_scripts_are_in_no_site(site):
    assert [path.name for path in site.rglob("*") if path.suffix in (".py", ".mjs", ".md")] == []


def test_no_page_is_long():
    """Generated pages too; the changelog grows with every release."""
    read = [page for page in [*pages(), ROOT / "README.md"] if page.name != "CHANGELOG.md"]
    long = {page.relative_to(ROOT).as_posix(): len(page.read_text().splitlines()) for page in read}
    assert {name: lines for name, lines in long.items() if lines > LINES} == {}


@pytest.mark.parametrize(
    ("page", "text", "repository", "made"),
    [
        ("ssh.md", "[a](../tasks/train.py)", "", "a"),
        (
            "ssh.md",
            "[a](../tasks/train.py)",
            "https://example.org/r",
            "[a](https://example.org/r/blob/main/tasks/train.py)",
        ),
        (
            "ssh.md",
            "[a](../tasks/planning)",
            "https://example.org/r/",
            "[a](https://example.org/r/tree/main/tasks/planning)",
        ),
        ("tutorial/plan.md", "[a](../../CONTRIBUTING.md#add-a-stage)", "", "[a](../CONTRIBUTING.md#add-a-stage)"),
        ("CONTRIBUTING.md", "[a](docs/proof/index.md)", "", "[a](proof/index.md)"),
        ("ssh.md", "[hardware.md](hardware.md#baselines)", "", "[Hardware](hardware.md#baselines)"),
        (
            "ssh.md",
            "`[a](../tasks/train.py)` [b](slurm.md#set-up)",
            "",
            "`[a](../tasks/train.py)` [b](slurm.md#set-up)",
        ),
        ("ssh.md", "```\n[a](../tasks/train.py)\n```", "", "```\n[a](../tasks/train.py)\n```"),
    ],
)
def test_links_lead_where_the_site_has_the_page_or_the_repository_the_file(page, text, repository, made):
    hook = runpy.run_path(str(DOCS / "site_hooks.py"))["on_page_markdown"]
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hook(text, page=shown, config=SimpleNamespace(repo_url=repository), files=None) == made


def test_a_link_to_a_file_that_is_not_there_fails_the_build(caplog):
    hook = runpy.run_path(str(DOCS / "site_hooks.py"))["on_page_markdown"]
    shown = SimpleNamespace(file=SimpleNamespace(src_uri="ssh.md"))
    hook("[a](../tasks/no_such.py)", page=shown, config=SimpleNamespace(repo_url=""), files=None)
    assert [(record.name, record.levelname) for record in caplog.records] == [("mkdocs.hooks.site", "WARNING")]


def test_where_figures_came_from_is_what_is_recorded():
    made = runpy.run_path(str(DOCS / "make_proof.py"))
    assert made["PAGE"].read_text() == made["render"](), "run: python docs/make_proof.py"
    texts = {one["name"]: (one["text"], DOCS / one["page"].partition("#")[0]) for one in made["figures"]()}
    lost = [name for name, (text, page) in texts.items() if text not in " ".join(page.read_text().split())]
    assert len(texts) > 10 and lost == []


MEASURED = re.compile(
    r"\d[\d.,]* ?(?:[kMGT]i?B\b|%|s\b|ms\b|(?:second|minute|hour|time)s?\b)"
    r"|\b(?:an?|half an|one|two|three|five|ten|half) (?:second|minute|hour)s?\b|\d\.\d{2,} to \d|\d of \d"
)
"""A figure of the README that somebody must have measured."""
ORIGIN = re.compile(
    r"\]\(docs/(?:proof/index\.md#[\w-]+|install\.md#what-it-costs|testing\.md)\)|`(python -m [^`]+)` \|$"
)
"""What leads to where it came from: a link, or in the table of promises the command, which docs/proof has."""


def without_origin(text, commands):
    """Paragraphs, items and rows with a figure, and with neither a link to its origin nor a command that is known."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = [part for part in re.split(r"\n\s*\n|\n(?=[-|] ?)", prose) if MEASURED.search(part)]
    origins = [(part, ORIGIN.search(part)) for part in parts]
    return parts, [part for part, found in origins if not found or (found[1] and found[1] not in commands)]


def test_each_figure_of_the_readme_leads_to_where_it_came_from():
    made = runpy.run_path(str(DOCS / "make_proof.py"))["figures"]()
    parts, wrong = without_origin((ROOT / "README.md").read_text(), {one["command"] for one in made})
    assert len(parts) >= 9 and wrong == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It takes 3 GB.", 1),
        ("It takes [3 GB](docs/install.md#what-it-costs).", 0),
        ("- A run takes half an hour.\n- Another [a minute](docs/proof/index.md#time-of-a-run).", 1),
        ("| a | 8.0 % | `python -m benchmarks.planning` |", 1),
        ("| a | 8.0 % | `python -m benchmarks.drift` |", 0),
        ("```console\n$ sleep 3 s\n```\n\nPython 3.11 on two machines", 0),
    ],
)
def test_a_figure_without_an_origin_is_found(text, count):
    assert len(without_origin(text, {"python -m benchmarks.drift"})[1]) == count


def test_the_reference_of_python_is_what_the_code_says():
    made = runpy.run_path(str(DOCS / "make_python.py"))
    pages = {name: made["render"](name) for name in made["PAGES"]}
    assert {path.name: path.read_text() for path in made["FOLDER"].iterdir()} == pages, (
        "run: python docs/make_python.py"
    )


def imported(path):
    """Public names of our modules that a file imports, as (module, name)."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(node.module, alias.name) for node in nodes for alias in node.names if not alias.name.isupper()}


def test_the_reference_of_python_has_what_shipped_stages_backends_engines_and_checks_import():
    """Of the modules that it lists: who adds one of these copies what the shipped ones do."""
    made = runpy.run_path(str(DOCS / "make_python.py"))["PAGES"]
    listed = {
        (module, name) for page in made.values() for module, names in page.modules.items() for name in names.split()
    }
    used = {
        each for page in made.values() for users in page.users for path in ROOT.glob(users) for each in imported(path)
    }
    modules = {module for page in made.values() if page.users for module in page.modules}
    assert len(used & listed) > 40
    assert {each for each in used if each[0] in modules} - listed == set()


@pytest.mark.skipif(browser.chromium() is None, reason="no Chromium on this machine")
def test_a_reader_without_a_network_searches(site, tmp_path):
    saw = json.loads(browser.run(ROOT / "tests" / "support" / "site_search.mjs", site, "disk nearly full", tmp_path))
    assert any("runbooks.html" in result for result in saw["results"]), saw["results"]
    assert saw["outside"] == [] and set(saw["wide"].values()) == {0}
    assert all((tmp_path / f"{name}.png").stat().st_size > 20_000 for name in ("search", *saw["wide"]))
