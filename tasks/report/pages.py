"""Makes a page of its template: one self-contained HTML text, light and dark, without script or outside address.

Markup lives in templates/, which escape every text: a document of the dataset may be hostile HTML. `page.html` is the frame of
all pages, `elements.html` what they have in common.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tasks.artifacts import Check
from tasks.report import templates
from tasks.report.data import duration, number, percent, short

SIGNS = {"good": "✓", "bad": "✕", "warn": "■", "idle": "–", "unknown": "?"}


def render(template: str, **values: Any) -> str:
    """A page as one HTML document, UTF-8; equal values give equal text."""
    return _templates().get_template(f"{template}.html").render(shown=[], **values)


def write_page(path: Path, text: str) -> Path:
    """Write a page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


def measured(check: Check) -> str:
    """The measured value, as a share where the limit is one."""
    if isinstance(check.measured, float) and "%" in check.limit:
        return f"{check.measured:.2%}" if check.measured < 1 else percent(check.measured)
    return number(check.measured)


def backticks(text: str) -> Markup:
    """A sentence whose words in backticks are code."""
    pieces = re.split(r"`([^`]*)`", text)
    return Markup().join(Markup("<code>{}</code>").format(p) if at % 2 and p else p for at, p in enumerate(pieces))


def inline(name: str) -> Callable[..., Markup]:
    """What makes an element of a text, and nothing of no text; much quicker than a macro, for there is one in most cells."""

    def element(text: object, style: str = "") -> Markup:
        if not text:
            return Markup()
        named = f' class="{escape(style)}"' if style else ""
        return Markup(f"<{name}{named}>{escape(text)}</{name}>")

    return element


@cache
def _templates() -> Environment:
    """The templates, each compiled once: what they become lies where Python keeps what it compiled of their package, which
    is made when that is imported."""
    folder = Path(templates.__file__).parent
    compiled = folder / "__pycache__"
    kept = compiled.is_dir() and os.access(compiled, os.W_OK) and not sys.dont_write_bytecode
    environment = Environment(
        loader=FileSystemLoader(folder),
        bytecode_cache=FileSystemBytecodeCache(str(compiled), "%s.jinja") if kept else None,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "anchor": lambda heading: heading.lower().replace(" ", "-"),
        "backticks": backticks,
        "code": inline("code"),
        "duration": duration,
        "known": lambda value, words=number: "" if value is None else words(value),
        "measured": measured,
        "number": number,
        "percent": percent,
        "short": short,
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100),
    }
    environment.globals |= {"SIGNS": SIGNS, **{name: inline(name) for name in ("code", "small", "span")}}
    return environment
