"""What runs a model, as the server sees it: requests in, pieces of text out, whatever computes them.

The one for ONNX Runtime is model_process.py: a process of its own, whose crash ends no server. HTTP is api.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from tasks.common.errors import IntegrityError
from tasks.storage.manifest import FileEntry, check


@dataclass(frozen=True)
class Ask:
    """One request for a completion."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    seed: int | None = None
    """Of what is drawn; None: another one each time."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not in it."""
    measure: bool = True
    """Whether the entropy of the first tokens is told."""
    tokens: tuple[int, ...] = ()
    """The prompt as tokens, which are taken as they are; `prompt` is empty then."""
    top_k: int = 0
    """So many of the likeliest tokens are drawn from; 0: all."""
    min_p: float = 0.0
    """A token that is less likely than this share of the likeliest one is not drawn."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer has."""
    frequency_penalty: float = 0.0
    """The same, as often as the answer has it."""
    repetition_penalty: float = 1.0
    """The logit of a token that prompt or answer has is divided by it, or multiplied where it is negative (Keskar et al.,
    arXiv:1909.05858)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer, besides those that end a document."""
    min_tokens: int = 0
    """So many tokens come before one that ends the answer."""
    ignore_end: bool = False
    """Whether the answer goes on after the end of a document."""
    logprobs: int | None = None
    """The log probability of each token is told, with so many of the likeliest ones; None: no log probabilities."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    messages: str = ""
    """A conversation instead of a prompt: OpenAI's messages, as JSON."""
    tools: str = ""
    """What the conversation's assistant may call: OpenAI's tools, as JSON; empty without any."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Ask:
        """The reverse of `dataclasses.asdict` and JSON."""
        bias = tuple((int(token), float(value)) for token, value in fields["logit_bias"])
        lists = {name: tuple(fields[name]) for name in ("stop", "tokens", "stop_tokens")}
        return cls(**{**fields, **lists, "logit_bias": bias})


@dataclass(frozen=True)
class Logprob:
    """How likely a token was where it stands, by the model's own distribution: before penalties and temperature."""

    text: str
    value: float | None
    """In nats; None for the first token of a prompt."""
    top: tuple[tuple[str, float], ...] = ()
    """The likeliest tokens there, and the token itself where it is not among them."""


@dataclass(frozen=True)
class Piece:
    """Text as it comes: whole characters only."""

    text: str
    tokens: int
    """Of the answer that it was made of."""
    logprobs: tuple[Logprob, ...] = ()
    """Of its tokens, where they were asked for."""
    of_prompt: bool = False
    """Whether it is the prompt, repeated."""


@dataclass(frozen=True)
class Ending:
    """The last thing that is said of a request."""

    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[int, ...] = ()
    """The answer's tokens, the end-of-text token included; empty where the runtime tells none."""
    entropy: float | None = None
    """Mean entropy of the next token, in nats, over the first tokens."""


@dataclass(frozen=True)
class Golden:
    """A prompt with the greedy answer that proves a model."""

    prompt: str
    tokens: tuple[int, ...]


class Unfit(ValueError):
    """The request's own fault: too long, empty, no text. The server answers 400."""


class Gone(Exception):
    """The model cannot answer: it crashed, hangs, or is being loaded. The server degrades, or answers 503.

    `taken`: it had the request when it went, and may have gone because of it. Nobody else is to be asked that again.
    """

    def __init__(self, message: str, *, taken: bool = False) -> None:
        super().__init__(message)
        self.taken = taken


def require_text(prompt: str) -> None:
    """Raise Unfit for a prompt that no tokenizer takes."""
    if not prompt or "\x00" in prompt:
        raise Unfit("the prompt is empty" if not prompt else "the prompt holds a NUL character: leave it out")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise Unfit("the prompt holds half a character (a lone surrogate): send whole ones")


class Runtime(Protocol):
    """One loaded model. Any number of requests at once; what it cannot take yet waits."""

    async def start(self, folder: Path, *, threads: int) -> None:
        """Load the model of a folder and prove it. Raises Gone, with the reason, when that fails."""

    def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """The answer's pieces, then its ending. Raises Unfit before the first piece, Gone at any time.

        When the caller closes the generator, the request is given up and its place is free.
        """

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def up(self) -> bool:
        """Whether it would answer now."""

    @property
    def waiting(self) -> int:
        """Requests that have got no piece yet."""

    async def close(self) -> None:
        """Give up what is under way, and free what it holds."""


# Memory that this machine, or this container, would still give. See cgroup-v2.rst of Linux's documentation.


CGROUP = Path("/sys/fs/cgroup")


def available(cgroup: Path = CGROUP) -> int:
    """Bytes: what Linux calls available, and no more than the container's limit leaves."""
    return min(psutil.virtual_memory().available, _of_container(cgroup))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 once it has gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _of_container(cgroup: Path) -> int:
    """Of cgroup v2: the limit less what cannot be given back; the cache of files can."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        payload = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(payload.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return 1 << 62


# The files of a model's folder, read once into memory of this process and compared with their digests on the way.
#
# What is loaded is what was compared: the model is made from these bytes, no file is opened again. So a file that is
# changed a moment after it was verified is not in the model, and is found at the next start. Costs the size of the
# weights while the model is made (ONNX Runtime copies), none afterwards.


Contents = Mapping[str, bytes | bytearray]
"""Bytes of the files at a folder's root, by name."""


def read_contents(folder: Path, files: Sequence[FileEntry] | None, *, named: str = "") -> dict[str, bytearray]:
    """The files at the root of a folder. Raises IntegrityError when any byte below the folder is not what `files` says.

    None for `files`: whoever mounted the folder has verified it. Raises ValueError when the folder is no folder.
    """
    if files is None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: name the one that was exported")
        return {path.name: bytearray(path.read_bytes()) for path in sorted(folder.iterdir()) if path.is_file()}
    contents = {entry.path: bytearray() for entry in files if "/" not in entry.path}
    problems = check(folder, files, copies={path: kept.extend for path, kept in contents.items()})
    if problems:
        text = ", ".join(f"{problem.path} ({problem.problem})" for problem in problems[:5])
        raise IntegrityError(
            f"the files of {named or folder} are not what was deployed: {text}",
            problems=[problem.model_dump() for problem in problems],
        )
    return contents
