"""What differs between two versions: files, configuration, metrics, inputs, code. Pure: manifests in, values out.

Which versions a name had is versions.py. Which arguments of a stage differ, in a few words, comes first.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.config.base import canonical_json
from tasks.storage.manifest import Manifest

# What differs between two sets of arguments, in words: why a stage runs again.


SHOWN = 3


def flat(name: str, value: Any) -> dict[str, Any]:
    """A tree of settings as one level, keys joined by dots."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, below in value.items() for key, leaf in flat(f"{name}.{part}", below).items()}


def what_changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Which arguments of a stage differ, old value and new one; the first three."""
    old, new = flat("", before), flat("", now)
    names = [n for n in sorted(old.keys() | new.keys()) if canonical_json(old.get(n)) != canonical_json(new.get(n))]
    messages = [f"{n.split('.', 2)[-1]} {_short(old.get(n))} -> {_short(new.get(n))}" for n in names[:SHOWN]]
    return "changed: " + ", ".join(messages) + (" ..." if len(names) > SHOWN else "")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:8] + "…"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileChange(_Part):
    """One file that differs. Sizes are in bytes; None where the file is not."""

    path: str
    before: int | None
    after: int | None


class Files(_Part):
    """Files by what became of them; `changed` have the same path and other bytes."""

    added: tuple[FileChange, ...]
    removed: tuple[FileChange, ...]
    changed: tuple[FileChange, ...]
    unchanged: int


class SettingChange(_Part):
    """A key of the configuration with its values; None where there is no such key."""

    key: str
    before: Any
    after: Any


class MetricChange(_Part):
    """A metric with its values; the difference is None where one of them is."""

    name: str
    before: float | None
    after: float | None
    difference: float | None


class InputChange(_Part):
    """What was read under a name (KIND/NAME), by versions: several, where one name was read in several versions."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Difference(_Part):
    """Only what differs."""

    before: str
    after: str
    """References."""
    files: Files
    configuration: tuple[SettingChange, ...]
    metrics: tuple[MetricChange, ...]
    inputs: tuple[InputChange, ...]
    code: tuple[str | None, str | None]
    """The commits, the same or not."""

    @property
    def same(self) -> bool:
        """Whether both are one version."""
        return self.before.rpartition("@")[2] == self.after.rpartition("@")[2]


def difference(before: Manifest, after: Manifest) -> Difference:
    """What differs between two versions of one kind. Raises ValueError for two kinds."""
    if before.content.kind != after.content.kind:
        raise ValueError(f"{before.ref} and {after.ref} are of different kinds; compare two of one kind")
    return Difference(
        before=before.ref,
        after=after.ref,
        files=_files(before, after),
        configuration=_configuration(before, after),
        metrics=_metrics(before.provenance.metrics, after.provenance.metrics),
        inputs=_inputs(before, after),
        code=(before.provenance.commit, after.provenance.commit),
    )


def _files(before: Manifest, after: Manifest) -> Files:
    old, new = ({file.path: file for file in manifest.content.files} for manifest in (before, after))
    both = sorted(old.keys() & new.keys())
    changed = [path for path in both if old[path].sha256 != new[path].sha256]
    return Files(
        added=tuple(FileChange(path=p, before=None, after=new[p].size) for p in sorted(new.keys() - old.keys())),
        removed=tuple(FileChange(path=p, before=old[p].size, after=None) for p in sorted(old.keys() - new.keys())),
        changed=tuple(FileChange(path=p, before=old[p].size, after=new[p].size) for p in changed),
        unchanged=len(both) - len(changed),
    )


def _configuration(before: Manifest, after: Manifest) -> tuple[SettingChange, ...]:
    old, new = (flat("", manifest.provenance.config or {}) for manifest in (before, after))
    keys = [k for k in sorted(old.keys() | new.keys()) if canonical_json(old.get(k)) != canonical_json(new.get(k))]
    return tuple(SettingChange(key=k.removeprefix("."), before=old.get(k), after=new.get(k)) for k in keys)


def _metrics(old: dict[str, float], new: dict[str, float]) -> tuple[MetricChange, ...]:
    return tuple(
        MetricChange(
            name=name,
            before=old.get(name),
            after=new.get(name),
            difference=new[name] - old[name] if name in old and name in new else None,
        )
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _inputs(before: Manifest, after: Manifest) -> tuple[InputChange, ...]:
    old, new = _read_by_name(before), _read_by_name(after)
    return tuple(
        InputChange(name=name, before=old.get(name, ()), after=new.get(name, ()))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _read_by_name(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """What a version was made from and under: versions by KIND/NAME."""
    result: dict[str, tuple[str, ...]] = {}
    for ref in sorted((*manifest.provenance.inputs, *manifest.provenance.context)):
        name, _, version = ref.partition("@")
        result[name] = (*result.get(name, ()), version)
    return result
