"""From a YAML file and `--set` to a configuration, with errors that name the key, the value and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tasks.cluster_config import ClusterConfig
from tasks.config import RetrainConfig
from tasks.settings import Settings

SHIPPED = Path(__file__).parent.parent / "configs"
C = TypeVar("C", bound=Settings)
INTEGER = "tag:yaml.org,2002:int"
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1:8 as minutes and seconds, 68; here it is a range."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != INTEGER]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    INTEGER, re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0[0-7_]*|[1-9][\d_]*)$"), list("-+0123456789")
)


def load(source: str | Sequence[str], overrides: list[str]) -> RetrainConfig:
    """A configuration by the name of a shipped one, or by path; of several, what a later one names wins. Raises ValueError."""
    value, said = _together(source)
    return validated(RetrainConfig, with_settings(value, overrides), said)


def load_cluster(source: str | Sequence[str], overrides: list[str]) -> ClusterConfig:
    """The section `cluster` alone, for what is no run of a flow: rules with other sections do not count. Raises ValueError."""
    strangers = [one for one in overrides if not one.startswith("cluster.")]
    if strangers:
        raise ValueError(f"--set {strangers[0]!r}: only settings of cluster count here, as cluster.nodes=2")
    value, said = _together(source)
    section = with_settings(value, overrides).get("cluster") or {}
    return validated(ClusterConfig, section, f"{said}, section cluster,")


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of both; where both name a section its keys are merged, anything else is that of `above`."""
    both = {key: merged(below[key], value) for key, value in above.items() if _sections(below.get(key), value)}
    return {**below, **above, **both}


def load_file(model: type[C], path: Path) -> C:
    """A configuration of another class, by path. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; docs/configuration.md shows what belongs into it")
    return validated(model, _read(path), str(path))


def changed(model: type[C], overrides: Iterable[str]) -> C:
    """The defaults of a class, changed as A.B=VALUE. Raises ValueError."""
    return validated(model, with_settings({}, overrides), "of --set")


def with_settings(value: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Keys and values, changed as A.B=VALUE. Raises ValueError."""
    changed_ = deepcopy(value)
    for override in overrides:
        _apply(changed_, override)
    return changed_


def validated(model: type[C], value: dict[str, Any], source: str) -> C:
    """A configuration of keys and values; `source` is named in errors. Raises ValueError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        words = "; ".join(_sentence(problem, model) for problem in error.errors())
        raise ValueError(f"the configuration {source} is not valid: {words}") from error


def _together(source: str | Sequence[str]) -> tuple[dict[str, Any], str]:
    """Keys and values of one or several files, and what to call them."""
    sources, value = [source] if isinstance(source, str) else source, dict[str, Any]()
    for each in sources:
        value = merged(value, _read(_path(each)))
    return value, " + ".join(sources)


def _sections(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _path(source: str) -> Path:
    shipped = SHIPPED / f"{source}.yaml"
    path = shipped if shipped.is_file() else Path(source)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
        raise ValueError(f"there is no configuration {source!r}: give the path of a YAML file, or one of {names}")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, and must hold keys and values")
    return value


def _apply(value: dict[str, Any], override: str) -> None:
    """Set `a.b=value`; the value is read as YAML, so 3e-4, true and [1, 2] are what they look like."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override!r} is not of the form a.b=value, for example training.learning_rate=0.002")
    *parents, last = key.split(".")
    for parent in parents:
        below = value.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ValueError(f"--set {override!r}: {parent} is a value, and has no keys below it")
        value = below
    try:
        value[last] = _scalar(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override!r}: {text!r} is not a YAML value; does it need quotes?") from error


def _scalar(text: str) -> Any:
    """YAML 1.1 reads 3e-4 as a string; people mean a number."""
    value = yaml.load(text, _Loader)
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _sentence(problem: Any, root: type[Settings]) -> str:
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
    said = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] == "value_error" else f", not {problem['input']!r}"
    return f"{key}: {said}{given}" if key else said


def _keys(path: list[str], root: type[Settings]) -> list[str]:
    """The keys that a section of the configuration has."""
    section: type[BaseModel] = root
    for part in path:
        if not part.isdigit():
            section = next((c for c in _classes(section.model_fields[part].annotation) if _is_section(c)), Settings)
    return list(section.model_fields)


def _classes(annotation: Any) -> list[Any]:
    """An annotation and everything inside it: of tuple[X, ...] | None, X among them."""
    return [annotation, *(inner for argument in get_args(annotation) for inner in _classes(argument))]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)
