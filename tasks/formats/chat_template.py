"""A conversation as the text that a model is tuned on, by the chat template of its tokenizer.

The template is rendered as Transformers renders it (transformers/utils/chat_template_utils.py), in jinja2's sandbox: it reads no
file, and reaches nothing of Python's. Who renders one of somebody else's has a process that can be ended, for one may never end:
serving a process of the model (tasks/jobs/serving/model_process.py), preprocessing a worker with a limit of time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

CHAT_TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
CONVERSATION_CHARACTERS = 4_000_000
"""Of a conversation as text; beyond, nothing is encoded."""


class Rendered(NamedTuple):
    """The text of a conversation."""

    text: str
    marked: tuple[tuple[int, int], ...]
    """Where the template says that answers stand, by `{% generation %}`: first character, and the one behind the last."""


class ChatTemplate:
    """A compiled template. State: where its marks were, of the conversation that is being rendered."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special` are the texts of special tokens by name, as `bos_token`. Raises ValueError for what is no template."""
        from jinja2 import TemplateError, meta, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        mark = self._mark

        class Generation(Extension):
            """`{% generation %}`, by which trainers mark what is learned."""

            tags = {"generation"}  # noqa: RUF012 - as jinja2 reads it

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

            def _generated(self, caller: Any) -> str:
                text = str(caller())
                mark(len(text))
                return text

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.source, self.special = source, dict(special)
        self.marks = "endgeneration" in source
        """Whether the template says what is learned."""
        self._length, self._marked = 0, list[tuple[int, int]]()
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether the template reads the tools of a conversation."""
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), answering: bool = True
    ) -> Rendered:
        """The text of a conversation, with `answering` up to where the model answers.

        Raises ValueError for one that the template refuses, or that becomes too long.
        """
        parts: list[str] = []
        self._length, self._marked = 0, []
        beside = {"tools": list(tools)} if tools else {}
        try:
            for part in self._template.generate(
                messages=list(messages), add_generation_prompt=answering, **beside, **self.special
            ):
                parts.append(part)
                self._length += len(part)
                if self._length > CONVERSATION_CHARACTERS:
                    raise _Refused(f"the conversation has more than {CONVERSATION_CHARACTERS} characters: shorten it")
        except _Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # whatever a template of somebody else's does
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return Rendered("".join(parts), tuple(self._marked))

    def _mark(self, length: int) -> None:
        self._marked.append((self._length, self._length + length))


class _Refused(Exception):
    """What the template says by `raise_exception`, or that the text is too long."""


def template_of(contents: Mapping[str, bytes | bytearray], *, given: str = "") -> ChatTemplate | None:
    """The chat template among the files of a tokenizer, or the one that is `given`, with the tokenizer's special tokens.

    None without one. Raises ValueError for one that cannot be read.
    """
    settings = json.loads(contents.get(SETTINGS, b"{}"))
    source = contents[CHAT_TEMPLATE].decode() if CHAT_TEMPLATE in contents else settings.get("chat_template")
    if isinstance(source, list):  # several by name, as older releases of Transformers wrote them
        source = next((each["template"] for each in source if each.get("name") == "default"), None)
    source = given or source
    if not source:
        return None
    special = {name: value for name, value in settings.items() if name.endswith("_token")}
    # A special token may be an object with its text in it.
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in special.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text and isinstance(text, str)})


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refused(message)
