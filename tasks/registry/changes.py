"""What differs between two sets of arguments, in words: why a stage runs again."""

from __future__ import annotations

from typing import Any

from tasks.config.base import canonical_json

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
    said = [f"{n.split('.', 2)[-1]} {_short(old.get(n))} -> {_short(new.get(n))}" for n in names[:SHOWN]]
    return "changed: " + ", ".join(said) + (" ..." if len(names) > SHOWN else "")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:8] + "…"
