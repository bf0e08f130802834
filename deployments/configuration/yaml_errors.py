"""What people write in YAML: how it is read, and what is wrong with it in words. Of configurations and of cases to plan."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

import yaml
from pydantic import BaseModel

INTEGER, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1:8 as minutes and seconds, 68, where a range is meant, and 3e-4 and 2e12 as text: here they are numbers."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != INTEGER]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    INTEGER, re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0[0-7_]*|[1-9][\d_]*)$"), list("-+0123456789")
)
Loader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def sentence(problem: Any, root: type[BaseModel]) -> str:
    """One of pydantic's problems in words: the key, what is wrong with its value, and what there is."""
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], _keys(path[:-1], root), n=1)
        hint = (
            f"did you mean {'.'.join([*path[:-1], close[0]])}?"
            if close
            else f"there are: {', '.join(_keys(path[:-1], root))}"
        )
        return f"{key}: there is no such key; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    text = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] == "value_error" else f", not {problem['input']!r}"
    return f"{key}: {text}{given}" if key else text


def _keys(path: list[str], root: type[BaseModel]) -> list[str]:
    """The keys that a section of the configuration has."""
    section: type[BaseModel] = root
    for part in path:
        if not part.isdigit():
            section = next(
                (
                    c
                    for c in _classes(section.model_fields[part].annotation)
                    if (isinstance(c, type) and issubclass(c, BaseModel))
                ),
                BaseModel,
            )
    return [field.alias or name for name, field in section.model_fields.items()]


def _classes(annotation: Any) -> list[Any]:
    """An annotation and everything inside it: of tuple[X, ...] | None, X among them."""
    return [annotation, *(inner for argument in get_args(annotation) for inner in _classes(argument))]
