"""`POST /v1/feedback`: a caller says whether an answer was right; the label is joined to the request by its id, and kept.

`ROOT/MODEL_VERSION/feedback/SERVER-NUMBER.jsonl`, beside the measures of the same model (tasks/jobs/serving/outputs.py), as
bounded as they are. Only who asked may label; of a request that nobody asked, that was asked by somebody else, and that is
forgotten, the answer is the same 404. Who a caller is decides the edge. Accuracy over time: tasks/serving/monitor/anomalies.py.
See docs/watch.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from tasks.formats.answers import Label, line
from tasks.jobs.serving.outputs import Outputs, Segments, clean, oldest_first

MOST_LABEL_SEGMENTS = 10
"""Of an endpoint: 20 MB, about 100,000 labels."""
LOOKS = 8
"""Labels that may wait for a look at the disk; more are answered 429 at once."""
LABELS = {"right": 1.0, "wrong": 0.0}
FOLDER = "feedback"


class FeedbackRequest(BaseModel):
    """Body of POST /v1/feedback: the id of a request, and either a label or a score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]
    label: Literal["right", "wrong"] | None = None
    score: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    comment: Annotated[str, Field(max_length=2000)] = ""

    @model_validator(mode="after")
    def _one_of_two(self) -> FeedbackRequest:
        if (self.label is None) == (self.score is None):
            raise ValueError("give either label, right or wrong, or score, from 0 to 1")
        return self

    @property
    def right(self) -> float:
        return LABELS[self.label] if self.label is not None else float(self.score or 0.0)


class Feedback:
    """Keeps labels. State: the file that is written to, and how many wait."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self._segments = Segments(outputs.folder / FOLDER, outputs.server, make_room=_make_room)
        self._one = asyncio.Lock()
        self._waiting = 0

    async def take(self, output: FeedbackRequest, caller: str) -> Label:
        """Join a label to its request and write it down. Raises HTTPException: 404 for a request that is not theirs, 429."""
        if self._waiting >= LOOKS:
            raise HTTPException(429, "too many labels wait: try again in a second", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._one:
                return await run_in_threadpool(self._take, output, caller)
        finally:
            self._waiting -= 1

    def _take(self, output: FeedbackRequest, caller: str) -> Label:
        asked = self.outputs.find(output.request_id, caller)
        if asked is None or not 200 <= asked.status < 300:
            raise HTTPException(404, f"no answer to a request {output.request_id!r} of yours is known here")
        settings = self.outputs.settings
        comment = (clean(output.comment, settings) or "") if settings.keep_text else ""
        label = Label(
            time=time.time(),
            id=asked.id,
            asked=asked.time,
            right=output.right,
            model=asked.model,
            rung=asked.rung,
            caller=asked.caller,
            comment=comment,
        )
        try:
            self._segments.write(line(label))
        except OSError as error:
            raise HTTPException(503, "the label could not be kept", {"Retry-After": "10"}) from error
        return label


def router(outputs: Outputs, caller_of: Callable[[Request], str]) -> APIRouter:
    """The route, over what a server keeps of its answers; `caller_of` names who asks: empty where no keys are asked for."""
    routes, feedback = APIRouter(), Feedback(outputs)

    @routes.post("/v1/feedback")
    async def label(body: FeedbackRequest, request: Request) -> dict[str, str | float | bool]:
        kept = await feedback.take(body, caller_of(request))
        return {"request_id": kept.id, "model": kept.model, "right": kept.right, "comment_kept": bool(kept.comment)}

    return routes


def _make_room(folder: Path) -> None:
    """The oldest labels of the endpoint go, whichever model they are of."""
    segments = oldest_first(list(folder.parents[1].glob(f"*/{FOLDER}/*.jsonl")))
    for path in segments[: max(len(segments) + 1 - MOST_LABEL_SEGMENTS, 0)]:
        path.unlink(missing_ok=True)
