"""What pydantic finds wrong with a value, as a sentence for people. Nothing else in Headway words its errors."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], *, values: bool = True) -> str:
    """Every problem of a value with its key, separated by semicolons; `model` is the class that was validated.

    Without `values` nothing of what was written is quoted: it may be a secret, or a stranger's.
    """
    return "; ".join(_sentence(problem, model, values) for problem in error.errors(include_url=False))


def _sentence(problem: Any, model: type[BaseModel], values: bool) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _keys(path[:-1], model)
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {'.'.join([*path[:-1], *close])}?" if close else f"there are: {', '.join(known)}"
        return f"{key}: there is no such key; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    text = problem["msg"].removeprefix("Value error, ")
    given = f", not {problem['input']!r}" if values and problem["type"] != "value_error" else ""
    return f"{key}: {text}{given}" if key else text


def _keys(path: list[str], model: type[BaseModel]) -> list[str]:
    """The keys that a section has. What no field is called is a place in a list, or a name that a person chose."""
    for part in path:
        if part in model.model_fields:
            classes = [one for one in _classes(model.model_fields[part].annotation) if isinstance(one, type)]
            model = next((one for one in classes if issubclass(one, BaseModel)), BaseModel)
    return [field.alias or name for name, field in model.model_fields.items()]


def _classes(annotation: Any) -> list[Any]:
    """An annotation and everything inside it: of tuple[X, ...] | None, X among them."""
    return [annotation, *(inner for argument in get_args(annotation) for inner in _classes(argument))]
