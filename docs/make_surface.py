"""Writes docs/surface.json: what others rely on, by name. `python docs/make_surface.py`; a test compares the file.

Commands with their options, the schemas of configuration files and records, the fields of `--json` (docs/json.md), exit codes,
and every name that leaves a process as text: modules that are started with `-m`, files, environment variables, events,
metrics and tags. Flows' entrypoints are in prefect.yaml. A change of the file is a change for somebody else: a script, a
dashboard, a home of an earlier release.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel

from deployments.cli.main import app
from tasks.common import errors

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("surface.json")
PRODUCT = ("flows", "tasks", "deployments")
SCHEMAS = (
    "deployments.configuration.platform:PlatformConfig",
    "tasks.config.flows:BackupConfig",
    "tasks.config.flows:RetrainConfig",
    "tasks.compute.job:Job",
    "tasks.jobs.checkpoint.files:Manifest",
    "tasks.security.policy:Policy",
    "tasks.registry.records:Record",
    "tasks.security.trust:TrustFile",
    "tasks.storage.manifest:Manifest",
    "tasks.storage.settings:Stores",
)
"""Files that people write, and records that later releases read: `module:class`."""
NAMES = {
    "environment": r"(?:HEADWAY|PREFECT|MLFLOW|AZURE|OPENLINEAGE)_[A-Z0-9_]+",
    "files": r"[\w.-]+\.(?:json|jsonl|yaml|yml|log|db|lock|bin|idx|onnx|md|html|svg|png|sh|toml|txt|csv)",
    "modules": r"(?:tasks|flows|deployments)(?:\.\w+)+",
    "dotted": r"headway(?:[._-][a-z0-9_-]+)+",
}
"""Whole string constants of the product that are such names, by kind."""


def surface() -> dict[str, Any]:
    """All of it, as JSON."""
    return {
        "commands": dict(commands(typer.main.get_command(app), "headway")),
        "schemas": {name: schema(name) for name in SCHEMAS},
        "json": json_fields(),
        "exit_codes": exit_codes(),
        "names": names(),
    }


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command by its words, with its parameters."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, {parameter(one): value(one) for one in command.params if one.name != "help"}
    for word, one in sorted(below.items()):
        yield from commands(one, f"{name} {word}")


def parameter(one: Any) -> str:
    return " ".join(sorted([*one.opts, *one.secondary_opts])) if one.param_type_name == "option" else f"<{one.name}>"


def value(one: Any) -> str:
    """What a parameter takes, in a word or two."""
    annotation = one.type_descriptor.annotation
    choices = [str(getattr(each, "value", each)) for each in get_args(annotation) if not isinstance(each, type)]
    kind = "|".join(choices) or getattr(annotation, "__name__", str(annotation))
    default = one.default if isinstance(one.default, str | int | float | bool) else None
    marks = ["required"] * one.required + ["many"] * (getattr(one, "multiple", False) or one.nargs == -1)
    return " ".join([kind, *marks, *([f"= {default}"] if default not in (None, False, "") else [])])


def schema(name: str) -> Any:
    """The JSON schema of a class without its words; a dataclass has the names and types of its fields."""
    module, _, kind = name.partition(":")
    found = getattr(importlib.import_module(module), kind)
    if issubclass(found, BaseModel):
        return without_words(found.model_json_schema())
    if not is_dataclass(found):
        raise TypeError(f"{name} is neither a model nor a dataclass")
    return {field.name: str(field.type) for field in fields(found)}


def without_words(value: Any, *, of_properties: bool = False) -> Any:
    """A schema without titles and descriptions, which are reworded freely."""
    if isinstance(value, list):
        return [without_words(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = value if of_properties else {key: one for key, one in value.items() if key not in ("title", "description")}
    return {key: without_words(one, of_properties=key in ("properties", "$defs")) for key, one in kept.items()}


def json_fields() -> dict[str, list[str]]:
    """The table of docs/json.md, which a test of `make long` holds against what the commands print."""
    table = (
        (ROOT / "docs" / "json.md")
        .read_text(encoding="utf-8")
        .partition("| command | fields |")[2]
        .partition("\n\n")[0]
    )
    lines = [re.findall(r"`([^`]+)`", line) for line in table.splitlines() if line.startswith("| `")]
    return {command: told for command, *told in lines}


def exit_codes() -> dict[str, int]:
    """By the error's class."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    return {kind.__name__: kind.exit_code for kind in kinds if hasattr(kind, "exit_code")}


def names() -> dict[str, list[str]]:
    """Every whole string constant of the product that is a name of one of the kinds."""
    there: dict[str, set[str]] = {kind: set() for kind in NAMES}
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for kind, pattern in NAMES.items():
                    if re.fullmatch(pattern, node.value):
                        there[kind].add(node.value)
    return {kind: sorted(values) for kind, values in there.items()}


def render() -> str:
    """The text of the file."""
    return json.dumps(surface(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            None
            if FILE.read_text(encoding="utf-8") == render()
            else f"{FILE.name} lags behind the code: run `make pages`"
        )
    FILE.write_text(render(), encoding="utf-8")
