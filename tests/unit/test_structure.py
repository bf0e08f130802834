import ast
import re
from pathlib import Path

import pytest

from benchmarks.structure import ROOT, Module, product
from tasks.artifacts import KINDS
from tasks.config.cluster import BACKENDS
from tasks.config.engines.registry import ENGINES
from tasks.config.flows import STAGES
from tasks.report.lineage import FAMILIES

pytestmark = pytest.mark.unit

TEXT = """
class Answer:
    said: str = ""

def look(told, *, here=1):
    for found in told:
        there = found
    return [said for said in told if (output := said)]
"""


def test_names_that_say_nothing_are_seen_and_those_of_fields_are_not():
    module = Module("one", Path("one.py"), TEXT, ast.parse(TEXT))
    assert sorted(module.empty_names) == ["found:6", "here:5", "said:8", "there:7", "told:5"]


def test_no_value_has_such_a_name():
    assert [f"{module.path}:{name}" for module in product().values() for name in module.empty_names] == []


OF_OTHERS = {"pretrain_gpt.py", "preprocess_data.py", "arguments.py", "indexed_dataset.py", "activation_checkpoint.py"}
OF_OTHERS |= {"chat_template_utils.py", "timer.py", "utils.py"}
"""Files of Megatron-LM, torchtitan, transformers, DeepSpeed and lm-evaluation-harness that our words name."""


def test_no_words_about_a_module_send_their_reader_to_itself_or_to_no_file():
    """Left behind where two files became one."""
    lost = []
    tops = ("flows", "tasks", "deployments", "benchmarks", "docker", "docs", "tests")
    files = {path.name for top in tops for path in (ROOT / top).rglob("*.py")}
    for module in product().values():
        words = [ast.get_docstring(module.tree) or "", *re.findall(r"^ *# .*", module.text, re.MULTILINE)]
        for text in words:
            own = re.search(rf"(?<![\w/.]){re.escape(module.path.name)}\b", text)
            named = re.findall(r"(?<![\w/])(?:flows|tasks|deployments)/[a-z_/]+\.py\b", text)
            unknown = set(re.findall(r"\b\w+\.py\b", text)) - files - OF_OTHERS
            if own or unknown or any(not (ROOT / name).is_file() for name in named):
                lost.append(f"{module.path}: {unknown or text}")
    assert lost == []


def asked_names(tree: ast.AST) -> list[str]:
    """Comparisons of something called `backend` or `engine` with the name of one; of a deployment `backend` is another word."""
    asked = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if not {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)} & {*BACKENDS, *ENGINES}:
                continue
            text = ast.unparse(node)
            subject = re.search(r"\b(?<!deployment\.)(backend|engine)\b", re.sub(r"'[^']*'", "", text))
            asked += [text] if subject else []
    return asked


def test_nobody_asks_for_the_name_of_a_backend_or_an_engine():
    """What is particular to one is declared by itself: tasks/config/backends, tasks/config/engines."""
    assert asked_names(ast.parse("a.backend == 'slurm', engine not in ('torch',)")) != []
    found = [f"{module.path}: {text}" for module in product().values() for text in asked_names(module.tree)]
    assert [text for text in found if "tasks/serving/" not in text] == []


def test_every_stage_that_runs_a_job_can_be_rendered():
    """`headway job render` plans by a table of its own."""
    running = {
        stage
        for stage in STAGES
        if re.search(r"\brun_job\(", (ROOT / "tasks" / f"{stage}.py").read_text(encoding="utf-8"))
    }
    table = (ROOT / "flows" / "support" / "planned_jobs.py").read_text(encoding="utf-8").partition("PROGRAMS: ")[2]
    assert len(running) > 5 and running == set(re.findall(r'^    "(\w+)": ', table, re.MULTILINE))


def test_every_kind_of_artifact_has_its_colour_in_a_drawn_lineage():
    kinds = [kind for family in FAMILIES.values() for kind in family]
    assert sorted(kinds) == sorted((*KINDS, "endpoint"))


def test_no_folder_of_ours_is_a_namespace_package():
    """For those an editable install puts a relative name on `sys.path`: a folder of that name is run, wherever one works."""
    folders = {path.parent for name in ("flows", "tasks", "deployments") for path in (ROOT / name).rglob("*.py")}
    assert folders and [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_file_of_unit_tests_says_so():
    files = list((ROOT / "tests" / "unit").rglob("test_*.py"))
    marked = re.compile(r"^pytestmark = pytest\.mark\.unit$|^@pytest\.mark\.unit$", re.MULTILINE)
    assert files and [path.name for path in files if not marked.search(path.read_text(encoding="utf-8"))] == []
    assert [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent == ROOT / "tests"] == []


def test_the_design_shows_the_chain_as_it_is():
    text = (ROOT / "flows" / "retrain.py").read_text(encoding="utf-8")
    chain = text[text.index("def chain(") :].partition("\n\n\n")[0]
    assert chain in (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
