"""The documents hold: their commands run, their links and paths exist, and the names in their tables are the real ones."""

import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import azure_cli
import pytest
import typer
import typer.main
import yaml
from waiting import limit, until

from deployments.cli.main import app
from deployments.cli.output import exit_code
from deployments.configuration.platform import AlertsConfig
from deployments.telemetry.monitors import rules
from tasks.common import errors
from tasks.config.flows import STAGES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
JSON = ROOT / "docs" / "json.md"
DESIGN = ROOT / "docs" / "DESIGN.md"  # the plan of the house: it also names rooms that are not built yet
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page != DESIGN) + HOW_TO
CHAPTERS = ("index", "corpus", "plan", "train", "serve", "watch", "retrain")
TUTORIAL = [ROOT / "docs" / "tutorial" / f"{name}.md" for name in CHAPTERS]
CONVERSATIONS = ROOT / "docs" / "tutorial" / "conversations.md"
PROOF = sorted((ROOT / "docs" / "proof").glob("*.md"))
PYTHON = sorted((ROOT / "docs" / "python").glob("*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, *TUTORIAL, CONVERSATIONS, *PROOF, *PYTHON]
TOP = ("flows", "tasks", "deployments", "tests", "benchmarks", "docs", "docker", ".ci")
NOT_RUN = {
    "source .venv/bin/activate": "the tests run in that environment",
    "python3 -m venv": "the tests run in that environment",
    "pip install": "the tests run in what it installs, and may have no network",
    "export MLFLOW_DISABLE_TELEMETRY": "changes the reader's own shell only",
    "mlflow ui": "serves until it is stopped; the database that it shows is looked for instead",
}
ONLY_TYPED = (
    "cp -r $(ls -d .headway/store/artifacts/tokenizer",
    "headway preprocess --input",
    "headway tokens",
    "headway qualify",
    "headway backup",
    "headway events ",
)
"""How the lines of docs/commands.md begin whose commands no other test of `make test` runs."""
COMMAND_SECONDS = 600
WHOLE = "headway retrain -c tiny"
"""The README's lifecycle runs as at a user's: none of its programs, and not Prefect's server, is a fork (fork_server.py)."""
pytestmark = pytest.mark.timeout(1800)  # the first test types the README


@dataclass(frozen=True)
class Command:
    """One line behind a `$`, and the exit code that the line's comment promises."""

    line: str
    code: int


@dataclass
class Checkout:
    """A working directory with the sources in it, where a reader types."""

    path: Path

    def run(self, line):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "HEADWAY_"))}
        if line == WHOLE:
            kept.pop("TESTS_FORK_SERVER", None)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.path,
            env={**kept, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit(COMMAND_SECONDS),
        )

    def json(self, line):
        ran = self.run(f"{line} --json")
        assert ran.returncode == 0, f"{line}: {ran.stderr}"
        return json.loads(ran.stdout)

    def follow(self, page, wanted=lambda line: True):
        """Write YAML blocks that begin with a file's name, and run commands and Python blocks; returns what went wrong."""
        for block in blocks(page, "yaml"):
            if named := re.match(r"# (\S+\.yaml)\n", block):
                (self.path / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (self.path / named[1]).write_text(block)
        lines = [command for command in commands(page) if wanted(command.line)]
        done = [(command.line, command.code, self._one(command.line)) for command in lines]
        done += [(block, 0, self.python(block)) for block in blocks(page, "python") if wanted(block)]
        return [
            f"{line}: exit code {ran.returncode}, not {code}\n{ran.stderr[-2000:]}"
            for line, code, ran in done
            if ran.returncode != code
        ]

    def python(self, block):
        (self.path / "block.py").write_text(block)
        return self.run("python block.py")

    def _one(self, line):
        if line.startswith("make "):
            return subprocess.run(["make", "-n", line.split()[1]], cwd=ROOT, capture_output=True, text=True)
        if any(map(line.startswith, NOT_RUN)) or (line.startswith("curl ") and not shutil.which("curl")):
            return subprocess.CompletedProcess(line, 0, "", "")
        return self.run(line.replace(":PORT/", f":{self._port()}/") if ":PORT/" in line else line)

    def _port(self):
        return self.json("headway endpoint list")["endpoints"][0]["url"].rpartition(":")[2]


def blocks(page, language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


def commands(page):
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [_command(line) for line in lines]


def _command(line):
    promised = re.search(r"# exit code (\d+)$", line)
    return Command(re.sub(r"\s+#.*$", "", line), int(promised[1]) if promised else 0)


def rows(page, *heads):
    """The cells of the table whose head begins with these words."""
    found, inside = [], False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells or set(cells[0]) <= set("-| "):
            inside = inside and bool(cells)
        elif inside:
            found.append([cell.strip(" |") for cell in cells])
        else:
            inside = [cell.strip(" |") for cell in cells][: len(heads)] == list(heads)
    return found


def names(cell):
    """Backticked paths of a cell; `.name` stands beside the one before it."""
    found = []
    for name in re.findall(r"`([^`]+)`", cell):
        found.append(f"{found[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name)
    return found


def holds(value, path):
    """Whether a JSON value has something at `a.b` or `a[].b`; every entry of a list must, and there must be one."""
    head, _, rest = path.partition(".")
    if not isinstance(value, dict) or head.removesuffix("[]") not in value:
        return False
    below = value[head.removesuffix("[]")]
    if head.endswith("[]"):
        return bool(below) and all(holds(one, rest) for one in below)
    return holds(below, rest) if rest else True


@contextmanager
def fresh_checkout(tmp_path_factory):
    """A checkout whose platform and endpoints are stopped at the end."""
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    for name in ("flows", "tasks", "deployments"):
        shutil.copytree(ROOT / name, made.path / name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        yield made
    finally:
        made.run("headway down --yes --endpoints")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout in which the commands of the README were typed, in their order, and `ONLY_TYPED` of docs/commands.md."""
    with fresh_checkout(tmp_path_factory) as made:
        wrong = made.follow(README) + made.follow(COMMANDS, lambda line: line.startswith(ONLY_TYPED))
        assert not wrong, "\n".join(wrong)
        yield made


@pytest.fixture(scope="module")
def typed(checkout):
    """The checkout in which the rest of docs/commands.md was typed too."""
    wrong = checkout.follow(COMMANDS, lambda line: not line.startswith(ONLY_TYPED))
    assert not wrong, "\n".join(wrong)
    return checkout


@pytest.mark.e2e
def test_the_commands_of_the_readme_make_what_it_says(checkout):
    assert "def " in checkout.run('headway complete tiny "def "').stdout
    assert (checkout.path / ".headway" / "mlflow" / "mlflow.db").is_file()
    assert (checkout.path / ".headway" / "prefect" / "credentials").read_text().startswith("headway:")


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if page != COMMANDS], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(typed, page):
    """Those of commands.md were typed for `typed`."""
    assert typed.follow(page) == []


@pytest.mark.long
def test_the_tutorial_ends_with_a_model_that_was_retrained_by_itself(tmp_path_factory):
    with fresh_checkout(tmp_path_factory) as made:
        assert [wrong for chapter in TUTORIAL for wrong in made.follow(chapter)] == []
        until(
            lambda: len(made.json("headway models code")["models"]) == 2, 600, every=2, why="model/code has one version"
        )
        assert made.follow(CONVERSATIONS) == []


@pytest.mark.unit
def test_every_alert_has_its_runbook_and_leads_to_it():
    page = ROOT / "docs" / "runbooks.md"
    shipped = rules(AlertsConfig())
    assert re.findall(r"^## (\S+)$", page.read_text(), re.MULTILINE) == [rule.name for rule in shipped]
    written = yaml.safe_load((ROOT / "docs" / "monitoring" / "headway-alerts.yaml").read_text())["groups"][0]["rules"]
    ends = [rule["annotations"]["runbook_url"] for rule in written]
    azure = json.loads((ROOT / "docs" / "monitoring" / "headway-alerts-azure.json").read_text())["resources"]
    assert ends == [rule["properties"]["description"].rpartition("Runbook: ")[2] for rule in azure]
    assert ends == [f"docs/runbooks.md#{rule.name}" for rule in shipped]
    sections = re.split(r"^## .*\n", page.read_text(), flags=re.MULTILINE)[1:]
    assert [text[:40] for text in sections if "```bash\n" not in text] == []


@pytest.mark.unit
@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_commands_of_headway(page):
    """Each is there, with its options and their values; `make long` runs them."""
    wrong = []
    for command in commands(page):
        line = re.sub(r"\$\([^)]*\)", "made", command.line)
        for words in re.findall(r"\bheadway ([^|;&><)]+)", line):
            try:
                understood(shlex.split(words))
            except typer.TyperException as error:
                wrong += [] if command.code == 2 else [f"{command.line}: {error.format_message()}"]
    assert wrong == []


@pytest.mark.unit
@pytest.mark.parametrize(
    "page",
    [
        "azure.md",
        "azure-by-hand.md",
        "azureml.md",
        "estate.md",
        "operations.md",
        "runbooks.md",
        "storage.md",
    ],
)
def test_what_a_page_has_the_reader_type_at_azure_is_understood(page):
    """The commands of `az` and of headway in blocks that no test runs: each is there, with its options."""
    text = (ROOT / "docs" / page).read_text()
    fenced = "\n".join(re.findall(r"^ *```bash\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL))
    typed = re.findall(r"(?:^ *|\$\()((?:az|headway) [^)\n>#]*)", fenced.replace("\\\n", " "), re.MULTILINE)
    wrong = []
    for line in typed:
        program, *words = shlex.split(line)
        try:
            azure_cli.parsed(words) if program == "az" else understood(words)
        except (typer.TyperException, azure_cli.Refused) as error:
            wrong.append(f"{line}: {error}")
    assert typed and wrong == []


def understood(words):
    """What the command line makes of words; raises what `headway` would say of wrong ones. Runs nothing."""
    group, name = typer.main.get_command(app), "headway"
    context = group.make_context(name, words, resilient_parsing="--version" in words)
    while hasattr(group, "commands") and (rest := [*context._protected_args, *context.args]):
        name, group, words = group.resolve_command(context, rest)
        context = group.make_context(name, words, parent=context, resilient_parsing="--help" in words)
    return context.params


def test_what_is_not_run_is_still_in_the_documents():
    lines = [command.line for page in (README, *PAGES) for command in commands(page)]
    assert [start for start in (*NOT_RUN, *ONLY_TYPED) if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.long
def test_the_files_that_pages_describe_hold_the_fields_that_they_name(typed):
    described = [(names(file)[0], names(cell)) for page in PAGES for file, cell in rows(page, "file", "holds")]
    assert len(described) > 15
    assert [name for name, fields in described if not any(map(fits(fields), found(typed, name)))] == []


def found(checkout, name):
    return [*(checkout.path / ".headway").rglob(name), *(ROOT / "tasks").rglob(name)]


def fits(fields):
    """Whether a file is there and, when it is JSON, holds all fields; of JSON lines the first counts."""

    def look(path):
        if path.suffix not in (".json", ".jsonl"):
            return True
        text = path.read_text()
        value = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
        return all(holds(value, field) for field in fields)

    return look


@pytest.mark.long
def test_the_json_of_every_command_has_the_fields_of_its_page(typed):
    common = {"schema", "exit_code", "error"}
    told = [(names(command)[0], names(cell)) for command, cell in rows(JSON, "command", "fields")]
    assert len(told) > 10 and told[-1][0] == "headway down --yes"
    for command, fields in told:
        said = typed.json(command)
        assert said.keys() - common == {re.split(r"[.\[]", field)[0] for field in fields}, command
        shown = [field for field in fields if not holds(said, field)]
        assert shown in ([], ["mlflow_run.url"]), f"{command}: {shown}"
        assert common <= said.keys()


def test_the_exit_codes_of_the_page_are_those_of_the_errors():
    table = rows(COMMANDS, "code", "meaning")
    told = {name: int(code) for code, _, cell in table for name in names(cell)}
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    known = {kind.__name__: kind.exit_code for kind in kinds if errors.HeadwayError in kind.__mro__[1:]}
    assert told == known | {kind.__name__: exit_code(kind()) for kind in (KeyboardInterrupt, ValueError)}
    assert {int(code) for code, *_ in table} == {0, 1, *told.values()}


def test_configuration_is_what_the_classes_say():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    wrong = [page.name for page, text in made["rendered"]().items() if page.read_text() != text]
    assert wrong == [], "run: python docs/make_configuration.py"


def test_what_others_rely_on_is_what_the_committed_file_says():
    """A change of names, options or schemas is a change for somebody else's script, dashboard or home: it is seen in review."""
    made = runpy.run_path(str(ROOT / "docs" / "make_surface.py"))
    assert made["FILE"].read_text() == made["render"](), "run: python docs/make_surface.py, and look at what changed"


@pytest.mark.unit
@pytest.mark.parametrize("head", ["promise", "finding"])
def test_every_promise_and_finding_has_its_test_in_make_test(head):
    """Each test of the table is there, and neither it nor all of its cases are left to `make long` or `make soak`."""
    told = [test for _, cell in rows(ROOT / "docs" / "testing.md", head, "tests") for test in names(cell)]
    wrong = []
    for test in told:
        file, _, name = test.partition("::")
        found = re.search(rf"^((?:@.*\n(?:[ )].*\n)*)*)def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
        if not found or re.search(r"^@pytest\.mark\.(long|soak)", found[1], re.MULTILINE):
            wrong.append(test)
    assert len(told) > 30 and wrong == []


@pytest.mark.unit
def test_every_failure_of_the_first_day_on_azure_has_its_test():
    told = rows(ROOT / "docs" / "proof" / "azure_day_one.md", "day one")
    tests = [test.partition("::") for *_, cell, _ in told for test in names(cell)]
    assert len(told) == 20
    assert [name for file, _, name in tests if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_link_leads_somewhere():
    wrong = []
    for page in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path).resolve()
            if not link.startswith("https://") and not (target.exists() and (not anchor or anchor in anchors(target))):
                wrong.append(f"{page.name}: {link}")
    assert wrong == []


def test_every_page_is_linked_from_another_one():
    """The menu of the site is not on GitHub."""
    linked = {
        (page.parent / path).resolve()
        for page in [*DOCUMENTS, DESIGN]
        for path in re.findall(r"\]\(([^)\s#]+)", page.read_text())
        if (page.parent / path).resolve() != page
    }
    assert [page.name for page in [*DOCUMENTS, DESIGN] if page not in {*linked, README}] == []


@pytest.mark.unit
def test_the_glossary_is_in_order():
    words = [word for word, *_ in rows(ROOT / "docs" / "glossary.md", "word", "meaning")]
    assert len(words) > 30 and words == sorted(set(words), key=str.lower)


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_path_that_a_document_names_exists():
    wrong = []
    for page in DOCUMENTS:
        for path in re.findall(r"`([\w.]+/[\w./-]*)`", page.read_text()):
            ours = path.split("/")[0] in TOP and not re.search(r"NAME|thing", path)
            if ours and not (ROOT / path).exists():
                wrong.append(f"{page.name}: {path}")
    assert wrong == []


@pytest.mark.unit
def test_the_readme_is_short_and_draws_every_stage_in_order():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 200
    (drawing,) = blocks(README, "mermaid")
    drawn = [word for word in re.findall(r"\w+", drawing) if word in STAGES]
    assert sorted(set(drawn)) == sorted(STAGES)
    assert [word for word in dict.fromkeys(drawn) if word != "benchmark"] == [s for s in STAGES if s != "benchmark"]


@pytest.mark.unit
def test_each_of_the_five_files_to_read_names_the_next():
    walk = ["README.md", "flows/retrain.py", "tasks/train.py", "tasks/jobs/train.py", "tasks/compute/slurm/backend.py"]
    assert [after for before, after in pairwise(walk) if after not in (ROOT / before).read_text()] == []


def test_every_path_of_the_layout_exists():
    tree = next(block for block in blocks(ROOT / "CONTRIBUTING.md", "") if block.startswith("flows/"))
    paths = [line.split()[0] for line in tree.splitlines()]
    assert len(paths) > 15 and [path for path in paths if not (ROOT / path).exists()] == []


def test_the_layout_of_the_design_has_every_folder_and_stage():
    layout = next(block for block in blocks(ROOT / "docs" / "DESIGN.md", "") if "orchestration/" in block)
    words = set(re.findall(r"[\w/]+/|\w+\.py", layout))
    folders = {
        f"{path.parent.name}/" for top in ("tasks", "deployments") for path in (ROOT / top).glob("*/__init__.py")
    }
    stages = {path.name for path in (ROOT / "tasks").glob("*.py")} - {"__init__.py"}
    assert len(folders) > 25 and (folders | stages) - words == set()
    drawn = (ROOT / "docs" / "images" / "packages.svg").read_text()
    files_only = {"support/", "cases/", "configs/"}
    assert [name for name in folders - files_only if f">{name[:-1]}<" not in drawn] == []


def test_every_page_that_a_module_points_to_exists():
    named = {
        (path.relative_to(ROOT), page)
        for top in ("flows", "tasks", "deployments", "benchmarks")
        for path in (ROOT / top).rglob("*.py")
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert named and [(path, page) for path, page in named if not (ROOT / page).is_file()] == []


def test_every_command_and_option_of_headway_is_explained():
    text = README.read_text() + COMMANDS.read_text()
    group = typer.main.get_command(app)
    words = [f"{name} {below}" for name, one in group.commands.items() for below in getattr(one, "commands", {})]
    words += [name for name, one in group.commands.items() if not hasattr(one, "commands")]
    assert [word for word in words if f"headway {word}" not in text] == []
    options = [
        option for option in group.commands["retrain"].params for option in option.opts if option.startswith("--")
    ]
    pages = text + "".join(page.read_text() for page in PAGES)
    assert [option for option in options if option not in ("--config", "--help") and option not in pages] == []
