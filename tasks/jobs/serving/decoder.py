"""The graph of an exported model, run for several answers at once: each has a row of the cache of keys and values.

Rows have lengths of their own, so an answer joins while others are under way: GroupQueryAttention takes each row's length from
the attention mask, and writes in place when its cache is handed in and out at the same address (onnxruntime,
contrib_ops/cpu/bert/group_query_attention.cc). onnxruntime-genai 0.18's own Engine batches on CUDA only in this way; on a CPU
whoever comes later waits for all that are under way. Which row belongs to whom is batch.py. The next token is chosen here
too, and how unsure the model was of it is told.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tasks.formats.onnx_data import require_own_data
from tasks.jobs.serving.runtime import Ask, Contents

Logits = NDArray[np.float32]
SEEDS = 2**64
"""A seed may be negative; a generator's may not."""
LEAST = -9999.0
"""Log probability of what cannot come, as in vLLM: JSON has no infinity."""
NUCLEUS = 1024
"""Words among which the nucleus of top_p is looked for first: sorting 150,000 takes 10 ms."""


class Choice:
    """Draws one answer's tokens. State: its own generator of random numbers, so other requests change nothing, and how often the
    prompt and the answer have each token, where that is asked for."""

    def __init__(self, ask: Ask, prompt: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        """`ends` are the tokens that end an answer."""
        self._ask, self._ends, self._prompt = ask, list(ends), list(prompt)
        self._random = np.random.default_rng(None if ask.seed is None else ask.seed % SEEDS)
        self._tokens: list[int] = []

    def token(self, logits: Logits) -> int:
        """From logits [words]; the likeliest at temperature 0."""
        ask = self._ask
        logits = self._changed(logits)
        if not ask.temperature:
            token = int(logits.argmax())
        else:
            weights = np.exp((logits - logits.max()).astype(np.float64) / ask.temperature)
            weights /= weights.sum()
            token = self._from(_cut(weights, ask))
        self._tokens.append(token)
        return token

    def _changed(self, logits: Logits) -> Logits:
        """The logits with all that the request has against tokens, in vLLM's order."""
        ask = self._ask
        too_early = len(self._tokens) < ask.min_tokens and self._ends
        penalised = ask.presence_penalty or ask.frequency_penalty or ask.repetition_penalty != 1
        if not (too_early or penalised or ask.logit_bias):
            return logits
        logits = logits.copy()
        for token, bias in ask.logit_bias:
            logits[token] += bias
        if too_early:
            logits[self._ends] = -np.inf
        if ask.repetition_penalty != 1:
            seen = np.unique([*self._prompt, *self._tokens])
            held = logits[seen]
            logits[seen] = np.where(held > 0, held / ask.repetition_penalty, held * ask.repetition_penalty)
        if self._tokens:
            seen, times = np.unique(self._tokens, return_counts=True)
            logits[seen] -= ask.presence_penalty + ask.frequency_penalty * times
        return logits

    def _from(self, weights: NDArray[np.float64]) -> int:
        if self._ask.top_p >= 1:
            return _drawn(weights, self._random.random())
        # The fewest likeliest words whose weights reach a share, the likeliest first (Holtzman et al.,
        # arXiv:1904.09751).
        count = min(NUCLEUS, len(weights))
        words = np.argpartition(weights, -count)[-count:]
        if weights[words].sum() < self._ask.top_p:
            words = np.arange(len(weights))
        words = words[np.lexsort((words, -weights[words]))]
        reached = int(np.searchsorted(weights[words].cumsum(), self._ask.top_p)) + 1
        words = words[:reached]
        return int(words[_drawn(weights[words], self._random.random())])


def _cut(weights: NDArray[np.float64], ask: Ask) -> NDArray[np.float64]:
    """Weights [words] that sum to 1, without the words that `min_p` and `top_k` exclude."""
    if not ask.min_p and not 0 < ask.top_k < len(weights):
        return weights
    weights = np.where(weights < ask.min_p * weights.max(), 0.0, weights)
    if 0 < ask.top_k < len(weights):
        words = np.lexsort((np.arange(len(weights)), -weights))
        weights[words[ask.top_k :]] = 0.0
    return np.asarray(weights / weights.sum())


def log_probabilities(logits: Logits, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log probability of a token, by logits [words], and the `count` likeliest tokens with theirs, the token itself always
    among them. What no floating-point number holds is LEAST."""
    shifted = logits.astype(np.float64) - logits.max()
    values = np.maximum(shifted - np.log(np.exp(shifted).sum()), LEAST)
    best = (
        np.argpartition(values, -count)[-count:] if 0 < count < len(values) else np.arange(len(values) if count else 0)
    )
    best = best[np.lexsort((best, -values[best]))].tolist()
    return float(values[token]), [(each, float(values[each])) for each in dict.fromkeys([*best, token])]


def entropy(logits: Logits) -> float:
    """Entropy, in nats, of the distribution that logits stand for; those of the last place of `logits` [1, places, words]."""
    last = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float32)
    shifted = last - last.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    return float(np.log(total) - float((shifted * weights).sum()) / total)


def _drawn(weights: NDArray[np.float64], at: float) -> int:
    """The place where `at`, in [0, 1), falls in the cumulative weights."""
    sums = weights.cumsum()
    return int(min(np.searchsorted(sums, at * sums[-1], side="right"), len(weights) - 1))


ROWS = 16
"""Answers that are under way at once; more of them wait."""
CHUNK = 128
"""Tokens of a prompt that are read at once: others go on between two chunks, and logits of so many places are in memory."""
KEPT_BYTES = 1 << 20
"""Memory of a row that is left to the next answer; more is given back when an answer ends."""
KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Memory that is there once it is written to, and can be given back by pages."""
ATTENTION = b"GroupQueryAttention"


@dataclass(frozen=True)
class _Cache:
    """Keys or values of one layer: [rows, heads, places, size]."""

    past: str
    present: str
    memory: mmap.mmap
    values: NDArray[Any]

    @property
    def row_bytes(self) -> int:
        return int(self.values[0].nbytes)


class Decoder:
    """A loaded graph and its cache of `rows` rows and one more, LOBBY, where a prompt is read. Not safe for threads."""

    def __init__(self, contents: Contents, settings: dict[str, Any], *, threads: int, rows: int = ROWS) -> None:
        """`settings` is `model` of genai_config.json. Raises ValueError for a graph that this decoder cannot batch."""
        self.rows, self.lobby = rows, rows
        self.words = int(settings["vocab_size"])
        self.places = int(settings["context_length"])
        # A session over bytes in memory; files of external data are the other ones beside the graph.
        name = settings["decoder"]["filename"]
        graph = contents[name]
        if ATTENTION not in graph:
            raise ValueError(
                f"{name} has no {ATTENTION.decode()}: export it with onnxruntime-genai's builder, for the CPU"
            )
        data = {path: value for path, value in contents.items() if path.startswith(name) and path != name}
        require_own_data(graph, {path: len(value) for path, value in data.items()}, named=name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        sizes = [len(value) for value in data.values()]
        options.add_external_initializers_from_files_in_memory(list(data), list(data.values()), sizes)
        self._session = onnxruntime.InferenceSession(bytes(graph), options, providers=["CPUExecutionProvider"])
        self._kinds = {each.name: each.type for each in self._session.get_inputs()}
        decoder = settings["decoder"]
        shape = (self.rows + 1, decoder["num_key_value_heads"], self.places, decoder["head_size"])
        caches = []
        for layer in range(decoder["num_hidden_layers"]):
            for part in ("key", "value"):
                past = decoder["inputs"][f"past_{part}_names"] % layer
                kind = np.dtype(KINDS.get(self._kinds.get(past, "nothing"), np.void))
                if kind == np.void:
                    raise ValueError(
                        f"the graph's {past} is {self._kinds.get(past)}; this release serves {list(KINDS)}"
                    )
                memory = mmap.mmap(-1, int(np.prod(shape)) * kind.itemsize, flags=PRIVATE)
                values = np.frombuffer(memory, kind).reshape(shape)
                caches.append(_Cache(past, decoder["outputs"][f"present_{part}_names"] % layer, memory, values))
        self._caches = caches
        self._logits_kind = KINDS[next(each.type for each in self._session.get_outputs() if each.name == "logits")]
        self._bindings: dict[tuple[int, int], Any] = {}

    @property
    def token_bytes(self) -> int:
        """Memory that a token of a prompt or an answer takes while its answer is under way."""
        return sum(cache.row_bytes for cache in self._caches) // self.places

    def read(self, row: int, tokens: list[int], *, before: int) -> Logits:
        """Read tokens into a row that holds `before` tokens; the logits [tokens, words] after each."""
        count, total = len(tokens), before + len(tokens)
        inputs = {"input_ids": np.asarray([tokens]), "attention_mask": np.ones((1, total), np.int64)}
        logits = self._run(row, 1, inputs=inputs | {"position_ids": np.arange(before, total)[None]}, places=count)
        return logits[0]

    def step(self, tokens: list[int], lengths: list[int]) -> Logits:
        """One more token for each of the first rows, which hold `lengths` tokens; logits [rows, words]."""
        positions = np.asarray(lengths, np.int64)[:, None]
        mask = (np.arange(max(lengths) + 1)[None] <= positions).astype(np.int64)
        inputs = {"input_ids": np.asarray(tokens)[:, None], "attention_mask": mask, "position_ids": positions}
        return self._run(0, len(tokens), inputs=inputs, places=1)[:, 0]

    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy what a row holds to another one."""
        for cache in self._caches:
            cache.values[target, :, :length] = cache.values[source, :, :length]

    def leave(self, row: int, *, length: int) -> None:
        """Give the memory of a row back that held `length` tokens."""
        if length * self.token_bytes < KEPT_BYTES:
            return
        for cache in self._caches:
            begin = -(-row * cache.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (row + 1) * cache.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                cache.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _run(self, row: int, count: int, *, inputs: dict[str, NDArray[Any]], places: int) -> Logits:
        # The cache of some rows, in and out at the same address; made once for each place and count.
        if (row, count) not in self._bindings:
            binding = self._bindings[row, count] = self._session.io_binding()
            for cache in self._caches:
                part = cache.values[row : row + count]
                place = ("cpu", 0, part.dtype, part.shape, part.ctypes.data)
                binding.bind_input(cache.past, *place)
                binding.bind_output(cache.present, *place)
        binding = self._bindings[row, count]
        held = {
            name: np.ascontiguousarray(value, dtype=np.int64) for name, value in inputs.items() if name in self._kinds
        }
        for name, value in held.items():
            binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        logits = np.empty((count, places, self.words), self._logits_kind)
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits.astype(np.float32, copy=False)
