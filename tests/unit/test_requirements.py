"""What the product imports is declared in pyproject.toml, and what it needs of a library's private modules is bounded above."""

import re
import tomllib
from functools import cache
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.install import ROLES, ROOT, imports, modules, role_of

pytestmark = pytest.mark.unit
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = {
    canonicalize_name(requirement.name): requirement
    for lines in (PROJECT["dependencies"], *EXTRAS.values())
    for requirement in map(Requirement, lines)
}
FIVE = {"prefect", "azure-ai-ml", "azure-storage-blob", "mlflow", "great-expectations"}
BY_HAND = {"megatron"}
"""What `cluster.python` brings by itself: in no extra, as its wheel lacks the program that is run."""


@cache
def owners() -> dict[str, list[str]]:
    """As `metadata.packages_distributions`, which looks at every installed file and takes seconds."""
    names: dict[str, list[str]] = {}
    for one in metadata.distributions():
        declared = (one.read_text("top_level.txt") or "").split()
        lines = [] if declared else (one.read_text("RECORD") or "").splitlines()
        for top in {*declared, *(re.split("[/.,]", line, maxsplit=1)[0] for line in lines)}:
            names.setdefault(top, []).append(one.metadata["Name"])
    return names


@cache
def files_of(distribution: str) -> set[str]:
    return {re.sub(r"(/__init__)?\.py$", "", str(path)) for path in metadata.files(distribution) or []}


def distribution_of(module: str) -> str | None:
    """The distribution that a module is of; None when it is not installed. Several share `azure`, `google`, `opentelemetry`."""
    one_of = sorted(set(owners().get(module.split(".")[0], [])))
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        holding = [name for name in one_of if len(one_of) == 1 or "/".join(parts[:length]) in files_of(name)]
        if holding:
            return canonicalize_name(
                next((name for name in holding if canonicalize_name(name) in DECLARED), holding[0])
            )
    return None


@cache
def everywhere() -> dict[str, str]:
    """Third-party module -> a module of ours that imports it."""
    return {name: module for module, path in modules() for name in imports(path)}


def test_whatever_is_imported_is_declared():
    known = {name: distribution_of(name) for name in everywhere() if name.split(".")[0] not in BY_HAND}
    installed = {name: owner for name, owner in known.items() if owner}
    assert {"pydantic", "prefect", "azure-core", "opentelemetry-sdk"} <= {*installed.values()}
    assert {name: (owner, everywhere()[name]) for name, owner in installed.items() if owner not in DECLARED} == {}


def test_what_is_private_is_bounded_above():
    private = {name: distribution_of(name) for name in everywhere() if re.search(r"\._[a-z]", name)}
    bounds = {owner: DECLARED[owner].specifier for owner in private.values() if owner}
    assert bounds and [name for name, bound in bounds.items() if not re.search(r"<|==", str(bound))] == []


def test_a_distribution_has_the_same_bounds_in_every_extra():
    several = {}
    for lines in (PROJECT["dependencies"], *EXTRAS.values()):
        for requirement in map(Requirement, lines):
            several.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert {name: bounds for name, bounds in several.items() if len(bounds) > 1} == {}


def test_every_module_is_of_a_role_and_every_role_is_an_extra():
    roles = {name: role_of(name) for name, _ in modules()}
    assert {*roles.values()} == {*ROLES} and {*ROLES} - {""} <= {*EXTRAS}
    assert {top for words in ROLES.values() for top in words.split()} <= {*roles}


def everything(extra: str) -> set[str]:
    requirements = [Requirement(line) for line in EXTRAS[extra]]
    ours = {part for one in requirements if one.name == "headway" for part in one.extras}
    return {one.name for one in requirements}.union(*(everything(part) for part in ours))


def test_one_machine_has_the_five_packages_and_names_of_earlier_releases_work():
    assert everything("local") | {Requirement(line).name for line in PROJECT["dependencies"]} >= FIVE
    assert {"torch", "onnxruntime-genai", "pyarrow"} <= everything("cluster") and "prefect" not in everything("cluster")
    assert "azure-monitor-opentelemetry-exporter" in everything("monitor")
    assert "psycopg2-binary" in everything("server") and {"lm_eval", "datasets"} <= everything("lm-eval")
