"""What flows are called with: a configuration, which may come from a schedule of another release, and datasets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from flows.support.prefect_run import config_of_deployment
from tasks.artifacts import Check, Dataset, Validation, parse_ref
from tasks.common.errors import Unknown
from tasks.config.base import Settings
from tasks.orchestration.run import current, pinned
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find

C = TypeVar("C", bound=Settings)
REMEDY = (
    "Correct it where the run was started: in the form; for a deployment, `headway up` registers what is shipped again; for a "
    "schedule, `set` in the platform's settings. docs/configuration.md lists all settings"
)


def configured(form: type[C], value: Any) -> C:
    """The configuration of the running flow run; what it does not name is as in its deployment, not as in the class.

    Raises ValueError as `checked` does.
    """
    if isinstance(value, dict) and not _whole(form, value):
        value = _over(form, config_of_deployment(), value)
    return checked(form, value)


def checked(form: type[C], value: Any) -> C:
    """The configuration of a run as its class. Raises ValueError with each key that does not hold, and the remedy."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        words = "; ".join(_sentence(problem) for problem in error.errors(include_url=False))
        raise ValueError(f"the configuration of this run does not fit this Headway: {words}. {REMEDY}") from None


def resolve(name: str) -> Dataset:
    """The dataset of a reference: NAME or dataset/NAME@VERSION; the run is about it. Raises Unknown."""
    (dataset,) = datasets((name,))
    current().results["dataset"] = dataset.ref
    return dataset


def datasets(names: Iterable[str]) -> tuple[Dataset, ...]:
    """The datasets of some references. Raises Unknown."""
    store = current().store
    found = (pinned(store, name, kind="dataset") for name in names)
    return tuple(Dataset(name=m.provenance.name, version=m.version, uri=store.uri_of(m)) for m in found)


def accepted_before(dataset: Dataset) -> Validation | None:
    """The newest verdict that accepted a version of the dataset which was published before this one; None for the first."""
    store = current().store
    published = find(store, *parse_ref(dataset.ref)).provenance.created
    for manifest in store.manifests("validation", dataset.name):
        judged = next(iter(manifest.provenance.inputs), "")
        earlier = judged not in ("", dataset.ref) and _created(store, judged) < published
        if earlier and (found := _accepted(store, manifest)):
            return found
    return None


def _created(store: Store, ref: str) -> str:
    """When an artifact was published; what is gone was published after all others."""
    try:
        return find(store, *parse_ref(ref)).provenance.created
    except Unknown:
        return "gone"


def _accepted(store: Store, manifest: Manifest) -> Validation | None:
    """A verdict as it was given, if the gate was open and it holds what drift is measured against."""
    if not any(file.path == "columns.json" for file in manifest.content.files):
        return None
    told = json.loads((store.fetch(manifest) / "validation.json").read_text(encoding="utf-8"))
    if not told["passed"]:
        return None
    checks = tuple(Check.model_validate(each) for each in told["checks"])
    subject = find(store, *parse_ref(told["accepted"]))
    return Validation(
        name=manifest.provenance.name,
        version=manifest.version,
        uri=store.uri_of(manifest),
        metrics=manifest.provenance.metrics,
        checks=checks,
        subject=Dataset(name=subject.provenance.name, version=subject.version, uri=store.uri_of(subject)),
    )


def _whole(form: type[Settings], value: dict[str, Any]) -> bool:
    """Whether a value names every setting of its class, section by section."""
    return all(
        name in value and (not isinstance(value[name], dict) or section is None or _whole(section, value[name]))
        for name, section in _sections(form).items()
    )


def _over(form: type[Settings], below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The settings of both; where both name a section its settings are merged, anything else, maps too, is that of `above`."""
    both = {
        name: _over(section, below[name], above[name])
        for name, section in _sections(form).items()
        if section is not None and isinstance(below.get(name), dict) and isinstance(above.get(name), dict)
    }
    return {**below, **above, **both}


def _sections(form: type[Settings]) -> dict[str, type[Settings] | None]:
    """Each setting of a class, with the class of what is a section."""
    return {name: _section(field.annotation) for name, field in form.model_fields.items()}


def _section(annotation: Any) -> type[Settings] | None:
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Settings)), None)


def _sentence(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"there is no setting {key}"
    said = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {said}, not {problem['input']!r}" if key and problem["type"] != "value_error" else said
