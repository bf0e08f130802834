"""From a YAML file and `--set` to a configuration, with errors that name the key, the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from tasks.common.validation import explain
from tasks.config.base import Settings
from tasks.config.cluster import ClusterConfig
from tasks.config.flows import RetrainConfig

SHIPPED = Path(__file__).parents[2] / "deployments" / "configs"
C = TypeVar("C", bound=Settings)
BASED_ON = "based_on"
"""Key of a file that lies on top of another one, as files of hardware do."""
TRAINS = "trains"
"""Key of a file that only says where: the configuration that is trained there when no file says what is."""
INTEGER, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1 reads 1:8 as minutes and seconds, 68, where a range is meant, and 3e-4 and 2e12 as text: here they are numbers."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != INTEGER]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    INTEGER, re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0[0-7_]*|[1-9][\d_]*)$"), list("-+0123456789")
)
Loader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def load(source: str | Sequence[str], overrides: list[str]) -> RetrainConfig:
    """A configuration by the name of a shipped one, or by path; of several, what a later one names wins. Raises ValueError."""
    value, output = _together(source)
    return validated(RetrainConfig, with_settings(value, overrides), output)


def presets() -> list[str]:
    """Names of the shipped configurations that say what is trained."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml") if "training" in read_whole(path))


def places() -> list[str]:
    """Names of the shipped configurations that say only where: they belong on top of one that says what is trained."""
    return sorted({path.stem for path in SHIPPED.glob("*.yaml")} - set(presets()))


def part_of(form: type[Settings], whole: RetrainConfig) -> dict[str, Any]:
    """The settings of a flow's class, out of those of a retraining run."""
    payload = {**whole.model_dump(mode="json"), "model": whole.training.model}
    return {key: value for key, value in payload.items() if key in form.model_fields}


def load_cluster(source: str | Sequence[str], overrides: list[str]) -> ClusterConfig:
    """The section `cluster` alone, for what is no run of a flow: rules with other sections do not count. Raises ValueError."""
    strangers = [one for one in overrides if not one.startswith("cluster.")]
    if strangers:
        raise ValueError(f"--set {strangers[0]!r}: only settings of cluster count here, as cluster.nodes=2")
    value, output = _together(source)
    section = with_settings(value, overrides).get("cluster") or {}
    return validated(ClusterConfig, section, f"{output}, section cluster,")


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of both; where both name a section its keys are merged, anything else is that of `above`."""
    both = {key: merged(below[key], value) for key, value in above.items() if _sections(below.get(key), value)}
    return {**below, **above, **both}


def load_file(model: type[C], path: Path) -> C:
    """A configuration of another class, by path. Raises ValueError."""
    return load_with_text(model, path)[0]


def load_with_text(model: type[C], path: Path) -> tuple[C, str]:
    """The same with the text of the file, which is read once: whoever keeps it keeps what was looked at. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; docs/configuration.md shows what belongs into it")
    value, text = _read(path)
    return validated(model, value, str(path)), text


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
        raise ValueError(f"the configuration {source} is not valid: {explain(error, model)}") from error


def _together(source: str | Sequence[str]) -> tuple[dict[str, Any], str]:
    """Keys and values of one or several files, and what to call them."""
    sources, value = [source] if isinstance(source, str) else source, dict[str, Any]()
    for each in sources:
        value = merged(value, read_whole(_path(each)))
    trained = value.pop(TRAINS, None)
    if trained is not None and "training" not in value:
        value = merged(read_whole(_path(str(trained))), value)
    return value, " + ".join(sources)


def read_whole(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Keys and values of a file, on top of the one that its key `based_on` names. Raises ValueError."""
    return on_its_base(_read(path)[0], path, above)


def on_its_base(value: dict[str, Any], path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The same of what has been read from a file."""
    base = value.pop(BASED_ON, None)
    if base is None:
        return value
    if not isinstance(base, str):
        raise ValueError(f"{path}: {BASED_ON} is {base!r}: name one configuration, as -c takes it")
    below, chain = _path(base), (*above, path)
    if below in chain:
        raise ValueError(f"{path}: {BASED_ON} {base} comes back to a file that is based on it: remove one of them")
    return merged(read_whole(below, chain), value)


def _sections(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _path(source: str) -> Path:
    shipped = SHIPPED / f"{source}.yaml"
    path = shipped if shipped.is_file() else Path(source)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
        raise ValueError(f"there is no configuration {source!r}: give the path of a YAML file, or one of {names}")
    return path


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.load(text, Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, and must hold keys and values")
    return value, text


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
        value[last] = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override!r}: {text!r} is not a YAML value; does it need quotes?") from error
