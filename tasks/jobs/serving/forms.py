"""The forms of requests and answers: OpenAI's completions of texts and conversations, Azure ML's text generation. Values only.

OpenAI's: https://platform.openai.com/docs/api-reference/completions and .../chat; beyond it, vLLM's fields. What of it a request
may hold and the server does not do is refused by name, unless it holds the value that changes nothing: clients send those along.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from tasks.jobs.serving.runtime import Ask, Ending, Logprob
from tasks.jobs.serving.service import Said

MOST_CHARACTERS = 1_000_000
MOST_PROMPTS = 16
MOST_ANSWERS = 64
"""To one request: its prompts times `n`."""
MOST_LOGPROBS = 20
"""As many as vLLM gives without being told otherwise."""
DEFAULT_TOKENS = 64
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
"""What is not done here, and the values by which nothing is asked for; null is one of them."""
NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **{
        name: NEUTRAL[name]
        for name in ("skip_special_tokens", "include_stop_str_in_output", "use_beam_search", "length_penalty")
    },
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
IGNORED = ("user", "safety_identifier", "prompt_cache_key")
"""Who asks, and what for: nothing of the answer depends on it."""
Prompt = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0)]
Texts = Annotated[list[Prompt], Field(max_length=MOST_PROMPTS)]
Tokens = Annotated[
    list[Annotated[list[Token], Field(min_length=1, max_length=MOST_CHARACTERS)]], Field(max_length=MOST_PROMPTS)
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=4)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


KINDS = ("(texts)", "(tokens)")
"""Of prompts; no part of a body's names."""


def _kind_of_prompt(prompts: Any) -> str:
    return KINDS[isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """How a stream is told."""

    include_usage: bool = False


class _Drawn(_Body):
    """What completions of a text and of a conversation have in common. Null is the same as nothing."""

    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=1024)] = {}
    seed: Seed | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] = []
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None

    def _ask(self, number: int, **more: Any) -> Ask:
        """The answer of this number to one prompt: the `n` of a prompt draw with seeds that follow each other."""
        return Ask(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            seed=None if self.seed is None else self.seed + number,
            stop=tuple(self.stop),
            stop_tokens=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_end=self.ignore_eos,
            **more,
        )


def _without_neutral(body: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """A body without what asks for nothing; one text to stop at is a list of it. Raises ValueError for what is not done here."""
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            raise ValueError(f"`{name}` is not supported here: leave it out")
    kept = {name: value for name, value in body.items() if value is not None and name not in (*neutral, *IGNORED)}
    if isinstance(kept.get("stop"), str):
        kept["stop"] = [kept["stop"]]
    return kept


class CompletionRequest(_Drawn):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[Texts, Tag(KINDS[0])] | Annotated[Tokens, Tag(KINDS[1])], Discriminator(_kind_of_prompt)
    ]
    """In a request also a text, or the tokens of one prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """One text, or one prompt, stands for a list of it."""
        if not isinstance(body, dict):
            return body
        kept = _without_neutral(body, NEUTRAL)
        prompt = kept.get("prompt")
        if prompt is not None and not (isinstance(prompt, str | list) and prompt):
            raise ValueError("`prompt` must be a text, tokens, or a list of up to 16 of either, and not empty")
        if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)):
            kept["prompt"] = [prompt]
        return kept

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo:
            raise ValueError("`max_tokens` is 0: ask for a token, or for the prompt by `echo`")
        if (answers := len(self.prompt) * self.n) > MOST_ANSWERS:
            raise ValueError(
                f"{len(self.prompt)} prompts with `n` {self.n} are {answers} answers: ask for up to {MOST_ANSWERS}"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"`min_tokens` {self.min_tokens} must not be above `max_tokens` {self.max_tokens}")
        return self

    def asks(self) -> list[Ask]:
        """An answer each, in the order of their choices."""
        prompts = [("", tuple(one)) if isinstance(one, list) else (one, ()) for one in self.prompt]
        return [
            self._ask(number, prompt=text, tokens=tokens, logprobs=self.logprobs, echo=self.echo)
            for text, tokens in prompts
            for number in range(self.n)
        ]

    def choices(self) -> list[Choice]:
        """Of all answers, before anything is told of them."""
        return [Choice(index, wants_logprobs=self.logprobs is not None) for index in range(len(self.prompt) * self.n)]


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Tool(_Body):
    """What the assistant may call. Its function is the template's to read: name, description, parameters."""

    type: Literal["function"]
    function: dict[str, Any]


class CalledFunction(_Body):
    """A function with its arguments, which OpenAI writes as JSON in a text."""

    name: str
    arguments: Annotated[str, Field(max_length=MOST_CHARACTERS)]

    def plain(self) -> dict[str, Any]:
        """As templates read it: the arguments as an object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except ValueError as error:
            raise ValueError(f"the arguments of {self.name} are no JSON: {error}") from None
        return {"name": self.name, "arguments": arguments}


class ToolCall(_Body):
    """One call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """One message. Which roles may follow each other says the model's chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(max_length=MOST_CHARACTERS)] | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls(cls, body: Any) -> Any:
        """A message that calls tools may have no content; null is the same as nothing."""
        if not isinstance(body, dict):
            return body
        kept = {name: value for name, value in body.items() if value is not None}
        return {"content": "", **kept} if kept.get("tool_calls") else kept

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"`tool_calls` are the assistant's, and this message is of the role {self.role}")
        for call in self.tool_calls:
            call.function.plain()
        return self

    def plain(self) -> dict[str, Any]:
        """As templates read it: one text, and calls with their arguments as objects."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        calls = [{"id": call.id, "type": call.type, "function": call.function.plain()} for call in self.tool_calls]
        beside = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text, **{name: value for name, value in beside.items() if value}}


class ChatRequest(_Drawn):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """`max_completion_tokens` is the newer name of `max_tokens`; with `tool_choice` none there are no tools."""
        if not isinstance(body, dict):
            return body
        kept = _without_neutral(body, NEUTRAL_IN_CHAT)
        if body.get("tool_choice") == "none":
            kept.pop("tools", None)
        if "max_completion_tokens" in kept:
            kept["max_tokens"] = kept.pop("max_completion_tokens")
        return kept

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.min_tokens > self.max_tokens or not self.max_tokens:
            raise ValueError(
                f"`max_tokens` {self.max_tokens} must be above 0, and not below `min_tokens` {self.min_tokens}"
            )
        return self

    def asks(self) -> list[Ask]:
        """An answer each, in the order of their choices."""
        messages = json.dumps([message.plain() for message in self.messages], ensure_ascii=False)
        tools = json.dumps([tool.model_dump() for tool in self.tools], ensure_ascii=False) if self.tools else ""
        asked = {"messages": messages, "tools": tools, "logprobs": self.top_logprobs if self.logprobs else None}
        return [self._ask(number, prompt="", **asked) for number in range(self.n)]

    def choices(self) -> list[ChatChoice]:
        """Of all answers, before anything is told of them."""
        return [ChatChoice(index, wants_logprobs=self.logprobs, top=self.top_logprobs) for index in range(self.n)]


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


class Choice:
    """One of a request's answers, as it is told. State: the characters of it that were told, by which tokens have places."""

    KIND = PART = "text_completion"
    """What OpenAI calls an answer with such choices, and a piece of one."""

    def __init__(self, index: int, *, wants_logprobs: bool) -> None:
        self.index, self._wants_logprobs = index, wants_logprobs
        self._told = 0

    def whole(self, one: Said) -> dict[str, Any]:
        """OpenAI's choice."""
        return self.part(one.text, one.logprobs, one.ending.finish_reason)

    def part(self, text: str, logprobs: Sequence[Logprob], finish_reason: str | None) -> dict[str, Any]:
        """A piece of it; places are counted from the beginning of the answer, prompt included."""
        output = {"index": self.index, "text": text, "finish_reason": finish_reason}
        if not self._wants_logprobs:
            return {**output, "logprobs": None}
        places = []
        for each in logprobs:
            places.append(self._told)
            self._told += len(each.text)
        return {
            **output,
            "logprobs": {
                "tokens": [each.text for each in logprobs],
                "token_logprobs": [each.value for each in logprobs],
                # Of tokens with the same text, as halves of characters have it, the likeliest
                "top_logprobs": [None if each.value is None else dict(reversed(each.top)) for each in logprobs],
                "text_offset": places,
            },
        }


class ChatChoice:
    """The same of a conversation. State: whether anything was told; the first piece names the role."""

    KIND, PART = "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, *, wants_logprobs: bool, top: int) -> None:
        self.index, self._wants_logprobs, self._top = index, wants_logprobs, top
        self._begun = False

    def whole(self, one: Said) -> dict[str, Any]:
        """OpenAI's choice."""
        message = {"role": "assistant", "content": one.text}
        return {"index": self.index, "message": message, **self._rest(one.logprobs, one.ending.finish_reason)}

    def part(self, text: str, logprobs: Sequence[Logprob], finish_reason: str | None) -> dict[str, Any]:
        """A piece of it."""
        delta = {
            **({} if self._begun else {"role": "assistant"}),
            **({"content": text} if text or not finish_reason else {}),
        }
        self._begun = True
        return {"index": self.index, "delta": delta, **self._rest(logprobs, finish_reason)}

    def _rest(self, logprobs: Sequence[Logprob], finish_reason: str | None) -> dict[str, Any]:
        likely = [
            {**_token(each.text, each.value or 0.0), "top_logprobs": [_token(*one) for one in each.top[: self._top]]}
            for each in logprobs
        ]
        return {"finish_reason": finish_reason, "logprobs": {"content": likely} if self._wants_logprobs else None}


def _token(text: str, likely: float) -> dict[str, Any]:
    return {"token": text, "logprob": likely, "bytes": list(text.encode())}


def completion(request_id: str, model_ref: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer of OpenAI's of this kind, or a piece of one, without its usage."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model_ref,
        "choices": choices,
    }


def usage(endings: Sequence[Ending], *, n: int) -> dict[str, int]:
    """What answers are counted as, `n` of them to each prompt, which counts once.

    `completion_tokens` has the end-of-text token in it when there is one.
    """
    read, written = sum(one.prompt_tokens for one in endings[::n]), sum(one.completion_tokens for one in endings)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def score(asks: list[Ask], texts: list[str], *, full: bool) -> list[dict[str, str]]:
    """Azure ML's answer: one object, an answer by the number of its prompt."""
    pairs = enumerate(zip(asks, texts, strict=True))
    return [{str(number): (ask.prompt if full else "") + text for number, (ask, text) in pairs}]
