"""Continuous batching: an answer joins those under way as soon as there is room, and leaves when it ends.

Each step reads a piece of the prompts that wait, and gives every answer under way one more token, in one run of the graph. Who
asks, and processes, do not live here: model_child.py.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.jobs.serving import runtime
from tasks.jobs.serving.decoder import CHUNK, Choice, Logits, entropy, log_probabilities
from tasks.jobs.serving.generation import TextStream
from tasks.jobs.serving.runtime import Ask, Ending, Logprob, Piece, Unfit

if TYPE_CHECKING:
    from tasks.jobs.serving.generation import Generation

ENTROPY_TOKENS = 32
"""First tokens of an answer whose entropy is measured: 0.6 ms each with 150,000 words, so it stays below a share of the whole."""
CACHE_SHARE = 0.5
"""Of the memory that is available when a model is loaded: what the answers under way may fill."""
Said = tuple[int, Piece | Ending]
"""The number of a request, and what is said of it."""


@dataclass
class _Answer:
    """One request. `tokens` are the answer's; the row of the cache holds the prompt's and all of these but the last."""

    number: int
    ask: Ask
    prompt: list[int]
    limit: int
    choice: Choice
    text: TextStream
    ends: frozenset[int]
    """Tokens that end it."""
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    told: int = 0
    entropies: list[float] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    """Of tokens whose text has not been told yet."""
    ended: bool = False

    @property
    def length(self) -> int:
        """Tokens that its row holds."""
        return self.read + max(len(self.tokens) - 1, 0)

    @property
    def most(self) -> int:
        return len(self.prompt) + self.limit


class Batch:
    """The requests of one model. State: those that wait, the one whose prompt is read, and those under way by row."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._decoder = generation, generation.decoder
        self._waiting: deque[_Answer] = deque()
        self._reading: _Answer | None = None
        self._rows: list[_Answer] = []
        self._room = int(runtime.available() * CACHE_SHARE) // self._decoder.token_bytes
        """Tokens that fit into memory."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._rows)

    def add(self, number: int, ask: Ask, *, prompt: list[int] | None = None) -> None:
        """Have a request answered in the steps to come. Raises Unfit."""
        tokens = self._tokens_of(ask) if prompt is None else prompt
        limit = min(ask.max_tokens, self._generation.context_length - len(tokens))
        ends = [*(() if ask.ignore_end else self._generation.end_tokens), *ask.stop_tokens]
        choice, text = Choice(ask, tokens, ends), TextStream(self._generation.text, ask.stop)
        answer = _Answer(number, ask, tokens, limit, choice, text, frozenset(ends))
        if answer.most > self._room:
            raise Unfit(f"prompt and answer may have {answer.most} tokens; the memory here has room for {self._room}")
        self._waiting.append(answer)

    def _tokens_of(self, ask: Ask) -> list[int]:
        """The tokens of a prompt. Raises Unfit."""
        words, context = self._decoder.words, self._generation.context_length
        named = {
            "prompt": ask.tokens,
            "logit_bias": [token for token, _ in ask.logit_bias],
            "stop_token_ids": ask.stop_tokens,
        }
        for name, tokens in named.items():
            if strange := [token for token in tokens if not 0 <= token < words]:
                raise Unfit(f"{name}: {strange[0]} is no token of this model, whose tokens are 0 to {words - 1}")
        if ask.tokens and len(ask.tokens) + (ask.max_tokens > 0) > context:
            raise Unfit(f"the prompt has {len(ask.tokens)} tokens; prompt and answer may have {context}: shorten it")
        if ask.messages:
            return self._generation.encode_conversation(json.loads(ask.messages), json.loads(ask.tools or "[]"))
        return list(ask.tokens) or self._generation.encode(ask.prompt)

    def drop(self, number: int) -> None:
        """Give a request up; its place is free for the next step."""
        self._waiting = deque(answer for answer in self._waiting if answer.number != number)
        if self._reading and self._reading.number == number:
            self._decoder.leave(self._decoder.lobby, length=self._reading.read)
            self._reading = None
        for answer in [answer for answer in self._rows if answer.number == number]:
            self._leave(answer)

    def step(self) -> list[Said]:
        """One more token for every answer under way, after a piece of the prompts that wait."""
        output = self._read_prompts()
        if not self._rows:
            return output
        tokens, lengths = [each.tokens[-1] for each in self._rows], [each.length for each in self._rows]
        logits = self._decoder.step(tokens, lengths)
        for answer, row in zip(self._rows, logits, strict=True):
            output += self._take(answer, row)
        self._leave_ended()
        return output

    def _read_prompts(self) -> list[Said]:
        messages: list[Said] = []
        left = CHUNK
        while left > 0 and (answer := self._next()):
            tokens = answer.prompt[answer.read : answer.read + left]
            logits = self._decoder.read(self._decoder.lobby, tokens, before=answer.read)
            self._note_prompt(answer, logits)
            answer.read += len(tokens)
            left -= len(tokens)
            if answer.read == len(answer.prompt):
                self._reading = None
                if answer.ask.echo:
                    text = answer.ask.prompt or self._generation.text.decode(answer.prompt)
                    messages.append((answer.number, Piece(text, 0, tuple(answer.logprobs), of_prompt=True)))
                    answer.logprobs = []
                if not answer.limit:  # nothing but the prompt was asked for
                    self._decoder.leave(self._decoder.lobby, length=answer.read)
                    messages.append((answer.number, Ending("length", len(answer.prompt), 0)))
                    continue
                self._decoder.move(self._decoder.lobby, len(self._rows), length=answer.read)
                self._decoder.leave(self._decoder.lobby, length=answer.read)
                self._rows.append(answer)
                output = self._take(answer, logits[-1])
                self._leave_ended()
                messages += output
        return messages

    def _note_prompt(self, answer: _Answer, logits: Logits) -> None:
        """Keep the log probabilities of the prompt's tokens, by the logits [tokens, words] after those that were read now."""
        if not answer.ask.echo or answer.ask.logprobs is None:
            return
        if not answer.read:
            answer.logprobs.append(Logprob(self._generation.text.name_of(answer.prompt[0]), None))
        followers = answer.prompt[answer.read + 1 : answer.read + 1 + len(logits)]
        answer.logprobs += [self._logprob(answer, row, token) for row, token in zip(logits, followers, strict=False)]

    def _logprob(self, answer: _Answer, logits: Logits, token: int) -> Logprob:
        name = self._generation.text.name_of
        value, top = log_probabilities(logits, token, answer.ask.logprobs or 0)
        return Logprob(name(token), value, tuple((name(each), likely) for each, likely in top))

    def _next(self) -> _Answer | None:
        """Whose prompt is read: the one begun, else the first that waits, if there is room for it."""
        held = sum(answer.most for answer in self._rows)
        fits = self._waiting and len(self._rows) < self._decoder.rows and held + self._waiting[0].most <= self._room
        if self._reading is None and fits:
            self._reading = self._waiting.popleft()
        return self._reading

    def _take(self, answer: _Answer, logits: Logits) -> list[Said]:
        """Choose an answer's next token and say what there is to say; the answer may end with it."""
        if answer.ask.measure and len(answer.entropies) < ENTROPY_TOKENS:
            answer.entropies.append(entropy(logits))
        token = answer.choice.token(logits)
        answer.tokens.append(token)
        if answer.ask.logprobs is not None:
            answer.logprobs.append(self._logprob(answer, logits, token))
        ended = token in answer.ends
        last = ended or len(answer.tokens) >= answer.limit
        text = "" if ended else answer.text.add(token)
        if answer.text.stopped or last:
            text += "" if answer.text.stopped else answer.text.end()
            answer.ended = True
        messages: list[Said] = []
        if text or (answer.ended and answer.logprobs):
            messages.append((answer.number, Piece(text, len(answer.tokens) - answer.told, tuple(answer.logprobs))))
            answer.told, answer.logprobs = len(answer.tokens), []
        if answer.text.stopped or last:
            reason: str = "stop" if ended or answer.text.stopped else "length"
            mean = sum(answer.entropies) / len(answer.entropies) if answer.entropies else None
            messages.append(
                (answer.number, Ending(reason, len(answer.prompt), len(answer.tokens), tuple(answer.tokens), mean))
            )
        return messages

    def _leave_ended(self) -> None:
        """Once all have got their token: until then a row holds one more than its answer knows."""
        for answer in [answer for answer in self._rows if answer.ended]:
            self._leave(answer)

    def _leave(self, answer: _Answer) -> None:
        """The last row takes the place of the one that leaves: rows under way are always the first ones."""
        row, last = self._rows.index(answer), len(self._rows) - 1
        if row != last:
            self._decoder.move(last, row, length=self._rows[last].length)
            self._rows[row] = self._rows[last]
        longest = max(answer.length, self._rows[last].length)
        self._rows.pop()
        self._decoder.leave(last, length=longest)
