"""The front matter of a card, as the Hugging Face hub has it at the beginning of a README.md, and the licence in it. Pure.

https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """What a card says of itself, and the text below it; {} and the whole text where it says nothing that can be read."""
    head, mark, body = text.removeprefix("---\n").partition("\n---\n")
    if not text.startswith("---\n") or not mark:
        return {}, text
    try:
        matter = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}, text
    return (matter, body) if isinstance(matter, dict) else ({}, text)


def license_in(matter: Mapping[str, Any]) -> str:
    """The ids of the licences, with commas between several; of `other`, its name. Empty where it says nothing, or `unknown`."""
    known = matter.get("license") or ""
    names = [str(one) for one in known] if isinstance(known, list) else [str(known)]
    named = [str(matter.get("license_name") or name) if name == "other" else name for name in names]
    return ", ".join(name for name in named if name not in ("", "unknown"))
