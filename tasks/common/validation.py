"""What pydantic finds wrong with a value, as a sentence for people. Nothing else in Headway words its errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

ALSO_CALLED = {
    "lr": ("learning_rate",),
    "batch_size": ("global_batch_size",),
    "batch": ("global_batch_size",),
    "seq_len": ("sequence_length",),
    "seq_length": ("sequence_length",),
    "max_length": ("sequence_length",),
    "max_steps": ("steps",),
    "epochs": ("steps",),
    "num_epochs": ("steps",),
    "warmup": ("warmup_steps",),
    "num_layers": ("layers",),
    "n_layer": ("layers",),
    "d_model": ("hidden_size",),
    "num_heads": ("heads",),
    "n_head": ("heads",),
    "gpus": ("gpus_per_node",),
}
"""What other programs call some settings."""
DEEPEST = 6
"""Sections in sections that are looked through."""


def explain(error: ValidationError, model: type[BaseModel], *, values: bool = True) -> str:
    """Every problem of a value with its key, separated by semicolons; `model` is the class that was validated.

    Without `values` nothing of what was written is quoted: it may be a secret, or a stranger's.
    """
    return "; ".join(_sentence(problem, model, values) for problem in error.errors(include_url=False))


def _sentence(problem: Any, model: type[BaseModel], values: bool) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        below = next(iter(problem["input"]), None) if isinstance(problem["input"], dict) else None
        close = _meant(path, model) or (_meant([*path, below], model) if isinstance(below, str) else "")
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(_keys(path[:-1], model))}"
        return f"{key}: there is no such key; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("tuple_type", "list_type"):
        text = f"must be a list, as {path[-1] if path else 'VALUE'}: [...]"
    given = f", not {problem['input']!r}" if values and problem["type"] != "value_error" else ""
    return f"{key}: {text}{given}" if key else text


def _meant(path: list[str], model: type[BaseModel]) -> str:
    """The key that a wrong one probably stands for: of that name anywhere, else alike in its section, else alike anywhere."""
    *section, word = path
    everywhere = list(_paths(model))
    named = [one for one in everywhere if one[-1] in (word, *ALSO_CALLED.get(word, ()))]
    beside, leaves = _keys(section, model), {one[-1] for one in everywhere}
    for keys, cutoff in () if named else ((beside, 0.8), (leaves, 0.85), (beside, 0.6)):
        if close := difflib.get_close_matches(word, keys, n=1, cutoff=cutoff):
            if keys is beside:
                return ".".join([*section, *close])
            named = [one for one in everywhere if one[-1] == close[0]]
            break

    def distance(one: tuple[str, ...]) -> tuple[int, int]:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, section, strict=False)))
        return -shared, len(one)

    return ".".join(sorted(named, key=distance)[0]) if named else ""


def _paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a class and of its sections."""
    for name, field in model.model_fields.items():
        key = (*above, field.alias or name)
        yield key
        for section in (field.annotation, *get_args(field.annotation)):
            if isinstance(section, type) and issubclass(section, BaseModel) and len(key) < DEEPEST:
                yield from _paths(section, key)


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
