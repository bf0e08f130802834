"""What a server keeps of its answers: measures, a line a request, in files of its own that stay bounded.

`ROOT/MODEL_VERSION/SERVER-NUMBER.jsonl`, where ROOT is one endpoint's. A thread writes, so no request waits for a disk; a kill
loses the lines of its last milliseconds. No text is kept, unless `deployment.answers.keep_text` says so: then without secrets,
and cut. The form of a line is tasks/formats/answers.py; what callers say of answers is serving/feedback.py; reading is
tasks/serving/monitor/anomalies.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.errors import IntegrityError
from tasks.common.redaction import redact
from tasks.common.seal import opened
from tasks.config.serving import AnswersConfig
from tasks.formats.answers import Answer, line, odd_share, refuses, repetition, unparsed

if TYPE_CHECKING:
    from tasks.jobs.serving.generation import Completion
    from tasks.jobs.serving.runtime import Ending

# Lines in files of a server's own, of bounded size and number: nobody's lines are torn, and no disk is filled.
#
# `FOLDER/SERVER-NUMBER.jsonl`. Every process of a server begins a file of its own. Which files make room for a new one
# says who writes (tasks/jobs/serving/outputs.py, feedback.py).


SEGMENT_BYTES = 2 << 20


class Segments:
    """State: the file that is written to, and how much is in it. For one thread at a time."""

    def __init__(
        self, folder: Path, server: str, *, make_room: Callable[[Path], None], size: int = SEGMENT_BYTES
    ) -> None:
        """`make_room` is called with the folder before a new file is begun in it."""
        self.folder, self.server, self.size = folder, server, size
        self._make_room = make_room
        self._path, self._written = self._next(), 0

    def write(self, data: bytes) -> None:
        """Append one line. Raises OSError."""
        if self._written and self._written + len(data) > self.size:
            self._path, self._written = self._next(), 0
        if not self._written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(self.folder)
        with open(self._path, "ab", buffering=0) as file:  # opened anew: another server may have taken it away
            self._written += file.write(data)

    def _next(self) -> Path:
        numbers = (int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{self.server}-*.jsonl"))
        return self.folder / f"{self.server}-{max(numbers, default=0) + 1:06d}.jsonl"


def oldest_first(paths: list[Path]) -> list[Path]:
    """Files by the time of their last line; one that is gone meanwhile comes first."""
    return sorted(paths, key=_age)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


MOST_SEGMENTS = 25
"""Of an endpoint: 50 MB, about 180,000 requests."""
FIRST_SEGMENTS = 5
"""The first of a model are kept: what it answered after its promotion is what later answers are compared with."""
WAITING = 10_000
"""Lines that may wait for the disk; what comes beyond is not kept."""
CLOSE_SECONDS = 2.0
REMEMBERED = 10_000
"""Requests of this process that a label is joined to without a look at the disk."""
GIVEN_UP = 499
"""Status of a request whose caller went away before its answer was whole: nobody's failure."""
log = logging.getLogger("headway.serve")


class Outputs:
    """Takes measures from a server. State: what waits, the files that are written to, and the last requests by their ids."""

    def __init__(self, folder: Path, server: str, settings: AnswersConfig | None = None) -> None:
        self.folder, self.server = folder, server
        self.settings = settings or AnswersConfig()
        self.counting = False
        """Whether requests are users'. Whoever proves a new server with golden prompts is none."""
        self._waiting: queue.Queue[Answer | None] = queue.Queue(WAITING)
        self._segments = Segments(folder, server, make_room=prune)
        self._recent: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._thread = threading.Thread(target=self._write_all, name="outputs", daemon=True)
        self._thread.start()

    @contextmanager
    def measuring(self, max_tokens: int) -> Iterator[dict[str, Any]]:
        """Measure a request; what is known of its answer is put into the yielded dictionary: `measures`, `measured`, and by name
        the fields `id`, `model`, `rung`, `caller`, `first_seconds`, `prompt` and `text` of tasks/formats/answers.py.

        Prompt and text are always told here, and only looked at, unless the settings say that they are kept.
        """
        began, clock = time.time(), time.perf_counter()
        result: dict[str, Any] = {}
        try:
            yield result
        except (asyncio.CancelledError, GeneratorExit):
            result |= {"status": GIVEN_UP, "error": "Closed"}
            raise
        except BaseException as error:
            result |= {"status": getattr(error, "status_code", 500), "error": type(error.__cause__ or error).__name__}
            raise
        finally:
            self.add(Answer(time=began, seconds=round(time.perf_counter() - clock, 6), max_tokens=max_tokens, **result))

    def add(self, answer: Answer) -> None:
        """Have a line written, once requests count. Never waits."""
        if not self.counting:
            return
        self._remember(answer)
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            log.warning("outputs: the disk does not keep up, an answer was not measured")

    def find(self, request: str, caller: str) -> Answer | None:
        """The answer to a caller's request, which any server of this endpoint may have given; None for one that is not known.

        What is not among this process's last requests is looked for on the disk: up to 50 MB are read, so not in an event loop.
        """
        return self._recent.get((request, caller)) or _on_disk(self.folder.parent, request, caller)

    def close(self) -> None:
        """Write what waits."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _remember(self, answer: Answer) -> None:
        if answer.id:
            self._recent[answer.id, answer.caller] = Answer(**{**vars(answer), "prompt": None, "text": None})
            while len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)

    def _write_all(self) -> None:
        while (answer := self._waiting.get()) is not None:
            try:
                self._segments.write(line(looked_at(answer, self.settings)))
            except (OSError, ValueError) as error:
                log.warning("outputs: %s", error)


def looked_at(answer: Answer, settings: AnswersConfig) -> Answer:
    """The answer as it is kept: what its text shows is noted, then the text goes, or stays without secrets and cut."""
    prompt, text = answer.prompt or "", answer.text
    shown: dict[str, Any] = {}
    if text is not None:
        shown["refused"] = refuses(text)
        shown["unparsed"] = unparsed(prompt, text, settings.expects, finish_reason=answer.finish_reason)
    kept = {name: clean(value, settings) for name, value in (("prompt", answer.prompt), ("text", text))}
    return Answer(**{**vars(answer), **shown, **(kept if settings.keep_text else dict.fromkeys(kept))})


def clean(text: str | None, settings: AnswersConfig) -> str | None:
    """A text as it may be kept: no secret in it, and no longer than the settings allow. Cut last: half a secret is one, too."""
    return None if text is None else redact(text)[: settings.most_characters]


def measures(prompt_tokens: int, output: Completion) -> dict[str, Any]:
    """What there is to measure of a completion."""
    return _measures(
        output.tokens,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(output.tokens),
        finish_reason=output.finish_reason,
        text=output.text,
        entropy=output.entropy,
    )


def measured(ending: Ending, text: str) -> dict[str, Any]:
    """What there is to measure of an answer that came in pieces; `text` is all of it."""
    return _measures(
        ending.tokens,
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        finish_reason=ending.finish_reason,
        text=text,
        entropy=ending.entropy,
    )


def _measures(tokens: Sequence[int], *, text: str, entropy: float | None, **counted: Any) -> dict[str, Any]:
    return {
        **counted,
        "repetition": repetition(tokens),
        "entropy": None if entropy is None else round(entropy, 4),
        "odd": odd_share(text),
    }


def prune(folder: Path) -> None:
    """Make room for one more file of a model's folder: others' later ones go first, then its own, then others' first ones.

    The oldest go first. Its own first ones stay; those of a model before it are needed again when it is rolled back to.
    """
    segments = oldest_first(list(folder.parent.glob("*/*.jsonl")))
    own = [path for path in segments if path.parent == folder]
    others = [path for path in segments if path.parent != folder]
    excess = len(segments) + 1 - MOST_SEGMENTS
    firsts = [path for path in others if path in _first_of(path.parent, others)]
    later = [path for path in others if path not in firsts]
    for path in [*later, *own[FIRST_SEGMENTS:], *firsts][: max(excess, 0)]:
        path.unlink(missing_ok=True)


def _first_of(folder: Path, segments: Sequence[Path]) -> list[Path]:
    """The first ones of a model's folder; `segments` are in the order of their time."""
    return [path for path in segments if path.parent == folder][:FIRST_SEGMENTS]


def _on_disk(root: Path, request: str, caller: str) -> Answer | None:
    """What the newest line of a caller's request tells."""
    wanted = f'"id":"{request}"'.encode()
    for path in reversed(oldest_first(list(root.glob("*/*.jsonl")))):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        place = data.rfind(wanted)
        while place >= 0:
            begins, ends = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
            # One that was cut by a kill, or damaged since, is none.
            try:
                answer = Answer(**json.loads(opened(data[begins : ends if ends >= 0 else None], where="the answer")))
            except (ValueError, TypeError, IntegrityError):
                answer = None
            if answer and (answer.id, answer.caller) == (request, caller):
                return answer
            place = data.rfind(wanted, 0, begins)
    return None
