"""The tokens that open a document, where a model's folder says them: in the post-processor of its tokenizer.json.

What first tokens are predicted from decides what a model makes of them, so evaluation, golden prompts and servers take the same.
An export stores it where transformers, vLLM and the conversion to GGUF look for it as well. Which tokens a checkpoint is measured
with is tasks/jobs/evaluation/heldout.py. Pure; the standard library only, for the serving image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RULES = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


def opening_of(rules: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that a tokenizer.json, given as its content, puts before a text; empty where it puts none."""
    processor = rules.get("post_processor") or {}
    opening: tuple[int, ...] = ()
    for each in processor.get("processors", [processor]):
        opening = (*_before(each), *opening)
    return opening


def store_opening(folder: Path, token: str, number: int) -> None:
    """Have a folder's tokenizer put a token before every text: its rules do so, and its settings name it `bos_token`."""
    rules = json.loads((folder / RULES).read_text(encoding="utf-8"))
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    before = rules.get("post_processor")
    rules["post_processor"] = {"type": "Sequence", "processors": [before, template]} if before else template
    (folder / RULES).write_text(json.dumps(rules, ensure_ascii=False, indent=2), encoding="utf-8")
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings |= {"bos_token": token, "add_bos_token": True}
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _before(processor: Mapping[str, Any]) -> tuple[int, ...]:
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return (int(processor["cls"][1]),)
    results: list[int] = []
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        results += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(results)
