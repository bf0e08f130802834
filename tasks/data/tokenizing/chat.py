"""Conversations as token ids, and which of them are the assistant's answers: what supervised fine-tuning learns.

The ids are those of the chat template's whole text, as `apply_chat_template` of transformers gives them. An answer is what the
template itself marks by `{% generation %}`, else what it writes of a turn behind the prompt for it: found by rendering the
conversation up to there, which must be how the whole one begins. See docs/data.md, "Conversations".
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.data.tokenizing.tokenizer import OpenedTokenizer, load
from tasks.formats.chat_template import CHAT_TEMPLATE, SETTINGS, ChatTemplate, template_of
from tasks.formats.mmididx import map_tokens, mask_of

RENDER_SECONDS = 10.0
"""For one conversation; a template that takes longer never ends."""

LOOKED_AT = 1 << 20
"""Tokens of a file in which ends of answers are looked for."""

FIRST = 0xF0000
DISGUISES = re.compile(r"([\U000F0000-\U000FFFFD])\1*")
"""Characters for private use, each of which stands for one special token while a template is rendered."""

Spans = Sequence[tuple[int, int]]
"""First character, and the one behind the last."""


class Chat(NamedTuple):
    """The tokens of one conversation."""

    tokens: NDArray[np.uint32]
    answers: NDArray[np.uint8]
    """1 where a token is of an answer, or ends it; else 0."""


class ChatEncoder:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: OpenedTokenizer, template: ChatTemplate) -> None:
        self.template, self._tokenizer = template, tokenizer

    def encode(self, conversation: str) -> Chat:
        """The tokens of a conversation, given as JSON. Raises ValueError for one that the template refuses or cannot mask."""
        if "\\u" in conversation:  # a special token, and what stands for one, are looked for as they are
            conversation = json.dumps(json.loads(conversation), ensure_ascii=False)
        given = self._disguised(conversation)
        with time_limit(RENDER_SECONDS):
            text, spans = answers_of(self.template, **json.loads(given))
        ids, places = self._encoded(text, disguised=given != conversation)
        offsets = np.array(places, np.int64).reshape(-1, 2)
        answers = np.zeros(len(offsets), np.bool_)
        for begin, end in spans:
            # An answer ends with its end-of-turn token: a line feed that a template writes behind that is not learned.
            turn = self._ends.search(text, begin, end) if self._ends else None
            answers |= (offsets[:, 0] < (turn.start(1) if turn else end)) & (offsets[:, 1] > begin)
        if not answers[1:].any():  # nothing stands before the first token to predict it from
            raise ValueError("no token of the conversation is of an answer: leave the record out")
        return Chat(np.array(ids, np.uint32), answers.astype(np.uint8))

    # A text that spells a special token is not that token: only the template writes those. Until the template has written its
    # own, each stands for itself as characters for private use, as many of them as it has, so that every place in the text holds.

    def _disguised(self, conversation: str) -> str:
        """The conversation, as JSON, with other characters where its texts spell special tokens."""
        if self._special is None or not self._special.search(conversation):
            return conversation
        if DISGUISES.search(conversation):
            raise ValueError(
                "the conversation spells a special token, and has characters for private use (from U+F0000 on): leave the record "
                "out"
            )
        return self._special.sub(lambda match: chr(FIRST + self._names.index(match[0])) * len(match[0]), conversation)

    def _encoded(self, text: str, *, disguised: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens, and where each stands; a stretch between special tokens that spells others is encoded as plain text."""
        tokenizer, ids, places = load(self._tokenizer.rules), list[int](), list[tuple[int, int]]()

        def add(begin: int, end: int, *, plain: bool) -> None:
            part = DISGUISES.sub(self._spelled, text[begin:end]) if plain else text[begin:end]
            tokenizer.encode_special_tokens = plain
            try:
                encoding = tokenizer.encode(part, add_special_tokens=False)
            finally:
                tokenizer.encode_special_tokens = False
            ids.extend(encoding.ids)
            places.extend((begin + first, begin + last) for first, last in encoding.offsets)

        done = 0
        while disguised and self._special and (match := DISGUISES.search(text, done)):
            begin = max((one.end() for one in self._special.finditer(text, done, match.start())), default=done)
            following = self._special.search(text, match.end())
            end = following.start() if following else len(text)
            add(done, begin, plain=False)
            add(begin, end, plain=True)
            done = end
        if done < len(text) or not done:
            add(done, len(text), plain=False)
        return ids, places

    def _spelled(self, run: re.Match[str]) -> str:
        """What a run of one character stands for: a special token, once or several times."""
        name = self._names[ord(run[1]) - FIRST]
        return name * (len(run[0]) // len(name))

    @cached_property
    def _ends(self) -> re.Pattern[str] | None:
        """Space at the end of a text, behind a special token."""
        return re.compile(rf"(?:{self._special.pattern})(\s+)\Z") if self._special else None

    @cached_property
    def _names(self) -> list[str]:
        """The special tokens, the longest first."""
        added = json.loads(self._tokenizer.rules).get("added_tokens", ())
        return sorted((token["content"] for token in added if token.get("special")), key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        return re.compile("|".join(map(re.escape, self._names))) if self._names else None


def said(tokens: NDArray[np.integer[Any]], rules: str) -> str:
    """The text of an answer's tokens, without those that are no text, as the one that ends a turn."""
    return str(load(rules).decode(tokens.tolist(), skip_special_tokens=True))


def open_chat(tokenizer: OpenedTokenizer, given: str = "") -> ChatEncoder:
    """The encoder of a tokenizer's folder, by its own chat template or the one that is given. Raises ValueError without one."""
    folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
    files = {name: folder / name for name in (CHAT_TEMPLATE, SETTINGS)}
    template = template_of({name: file.read_bytes() for name, file in files.items() if file.is_file()}, given=given)
    if template is None:
        raise ValueError(
            f"the tokenizer in {folder} has no chat template, and conversations become text by one: set "
            "preprocessing.chat_template to a file of one, or take the tokenizer of a model that was tuned to chat"
        )
    return ChatEncoder(tokenizer, template)


def answers_of(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()
) -> tuple[str, Spans]:
    """The text of a conversation, and where its answers stand. Raises ValueError where the template does not tell."""
    whole = template.render(messages, tools=tools, answering=False)
    if template.marks:
        if not whole.marked:
            raise ValueError("the chat template has {% generation %}, and marks no answer of this conversation")
        return whole.text, whole.marked
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], tools=tools, answering=True).text
        behind = template.render(messages[: number + 1], tools=tools, answering=False).text
        for part in (before, behind):
            if not whole.text.startswith(part):
                raise ValueError(
                    f"turn {number + 1} (assistant): the chat template writes the turns up to it otherwise when more follow, so "
                    "its answer cannot be separated from the prompt: put {% generation %} and {% endgeneration %} around the "
                    "answer in a template of your own, and name that as preprocessing.chat_template"
                )
        if len(behind) <= len(before):
            raise ValueError(f"turn {number + 1} (assistant): the chat template leaves it out; leave the record out")
        spans.append((len(before), len(behind)))
    return whole.text, spans


def turn_ends(prefix: Path, rules: str) -> list[int]:
    """The special tokens with which answers end, in the first of a file's conversations: what a model is to stop at."""
    tokens, mask = (map_tokens(path)[:LOOKED_AT] for path in (prefix, mask_of(prefix)))
    last = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) == -1)
    special = {token["id"] for token in json.loads(rules).get("added_tokens", ()) if token.get("special")}
    return sorted(special & set(np.unique(tokens[last]).tolist()))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when what is done inside takes longer. Only a main thread can be told of time: workers are such."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
