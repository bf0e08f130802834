"""What flows are called with: a configuration, which may come from a schedule of another release, and a dataset."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from tasks.artifacts import Dataset, parse_ref
from tasks.lifecycle import current
from tasks.settings import Settings
from tasks.storage.store import find

C = TypeVar("C", bound=Settings)
REMEDY = (
    "Correct it where the run was started: in the form; for a deployment, `headway up` registers what is shipped again; for a "
    "schedule, `set` in the platform's settings. docs/configuration.md lists all settings"
)


def checked(form: type[C], value: Any) -> C:
    """The configuration of a run as its class. Raises ValueError with each key that does not hold, and the remedy."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        words = "; ".join(_sentence(problem) for problem in error.errors(include_url=False))
        raise ValueError(f"the configuration of this run does not fit this Headway: {words}. {REMEDY}") from None


def resolve(name: str) -> Dataset:
    """The dataset of a reference: NAME or dataset/NAME@VERSION. Raises Unknown."""
    store = current().store
    manifest = find(store, *parse_ref(name, kind="dataset"))
    dataset = Dataset(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest))
    current().results["dataset"] = dataset.ref
    return dataset


def _sentence(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"there is no setting {key}"
    said = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {said}, not {problem['input']!r}" if key and problem["type"] != "value_error" else said
