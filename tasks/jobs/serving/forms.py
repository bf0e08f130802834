"""The forms of requests and answers: OpenAI's completions, and the one of Azure ML's text generation. Values only.

OpenAI's: https://platform.openai.com/docs/api-reference/completions. What of it a request may hold and the server does not do is
refused by name, unless it holds the value that changes nothing: clients send those along.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.jobs.serving.runtime import Ask, Ending

MOST_CHARACTERS = 1_000_000
MOST_PROMPTS = 16
DEFAULT_TOKENS = 64
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""What is not done here, and the values by which nothing is asked for; null is one of them."""
IGNORED = ("user",)
Prompt = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=4)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """How a stream is told."""

    include_usage: bool = False


class CompletionRequest(_Body):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed | None = None
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """Null is the same as nothing; one text stands for a list of it, and a list of one prompt for the prompt."""
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise ValueError(f"`{name}` is not supported here: leave it out")
        kept = {name: value for name, value in body.items() if value is not None and name not in (*NEUTRAL, *IGNORED)}
        if isinstance(kept.get("stop"), str):
            kept["stop"] = [kept["stop"]]
        if isinstance(kept.get("prompt"), list):
            if len(kept["prompt"]) != 1:
                raise ValueError("`prompt` holds several prompts, or none: send one text a request")
            kept["prompt"] = kept["prompt"][0]
        return kept

    def ask(self) -> Ask:
        return Ask(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop),
        )


class ScoreParameters(_Body):
    """As Azure ML's models for text generation name them."""

    max_new_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    do_sample: bool = True
    """False: greedy, whatever the temperature."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed | None = None
    stop: Stops = []
    return_full_text: bool = False
    """Whether the prompt stands before each answer."""


class ScoreInput(_Body):
    """Prompts that are answered together."""

    input_string: Annotated[list[Prompt], Field(min_length=1, max_length=MOST_PROMPTS)]
    parameters: ScoreParameters = ScoreParameters()


class ScoreRequest(_Body):
    """Body of POST /score."""

    input_data: ScoreInput

    def asks(self) -> list[Ask]:
        how = self.input_data.parameters
        heat = how.temperature if how.do_sample else 0.0
        stop = tuple(how.stop)
        return [
            Ask(prompt, how.max_new_tokens, temperature=heat, top_p=how.top_p, seed=how.seed, stop=stop)
            for prompt in self.input_data.input_string
        ]


def completion(
    request_id: str, model_ref: str, text: str, ending: Ending | None, *, kind: Literal["whole", "piece"]
) -> dict[str, Any]:
    """OpenAI's text_completion object, or a piece of one; `completion_tokens` counts the end-of-text token when there is one."""
    reason = ending.finish_reason if ending else None
    output = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_ref,
        "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None}],
    }
    return {**output, "usage": usage(ending)} if kind == "whole" and ending else output


def usage(ending: Ending) -> dict[str, int]:
    """What an answer is counted as."""
    read, written = ending.prompt_tokens, ending.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def score(asks: list[Ask], texts: list[str], *, full: bool) -> list[dict[str, str]]:
    """Azure ML's answer: one object, an answer by the number of its prompt."""
    pairs = enumerate(zip(asks, texts, strict=True))
    return [{str(number): (ask.prompt if full else "") + text for number, (ask, text) in pairs}]
