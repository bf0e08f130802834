"""Both sides of an export, loaded and compared: the checkpoint in PyTorch and the exported model, each with its own tokenizer.

Single prompts are compared by logits and greedy tokens, held-out text by bits per byte under the evaluation's own measure. What
the exported model answers is also measured as an endpoint measures its own answers, for later ones to be compared with. Speed is
variants.py.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from tasks.common.process import read_json
from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation.scores import Estimate, bits_per_byte, bits_per_byte_interval
from tasks.formats.model_folder import summary
from tasks.jobs.evaluation.heldout import Encoded, Heldout, encode_for, opening_of, read_heldout
from tasks.jobs.evaluation.scoring import context_of, score
from tasks.jobs.exporting.graph import MODEL
from tasks.jobs.node.runtime import Rank
from tasks.jobs.serving.generation import Completion, Generation
from tasks.jobs.serving.outputs import measures

KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Answer:
    """One golden prompt, completed greedily by both sides."""

    prompt: str
    onnx: Completion
    torch_tokens: list[int]
    equal: bool
    """Whether both encoded the prompt to the same tokens and completed it with the same tokens."""
    logit_error: float
    """Largest absolute difference of a logit, over the prompt's positions and the vocabulary."""
    logit_scale: float
    """Largest absolute logit of PyTorch's."""


class Original:
    """A checkpoint in PyTorch, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        self._opening = list(opening_of(checkpoint))
        self.network = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt behind those that its documents are measured with; once, where it begins with them."""
        tokens = [int(token) for token in self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        return tokens if tokens[: len(self._opening)] == self._opening else [*self._opening, *tokens]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Of shape [1, tokens, vocabulary]."""
        result: NDArray[np.float32] = self.network(torch.tensor([tokens])).logits.numpy()
        return result

    @torch.no_grad()
    def greedy(self, tokens: list[int], limit: int, *, ends: list[int]) -> list[int]:
        """At most `limit` tokens after the prompt's, by transformers' own `generate` with its cache."""
        from transformers import GenerationConfig

        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=limit,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        prompt = torch.tensor([tokens])
        output = self.network.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
        return [int(token) for token in output[0][len(tokens) :]]


class OnnxNetwork:
    """An exported graph that is called as transformers' networks are, without what came before: all logits of some rows."""

    def __init__(self, folder: Path, *, threads: int, provider: str = CPU) -> None:
        payload = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
        self.config = SimpleNamespace(
            vocab_size=int(payload["vocab_size"]), max_position_embeddings=int(payload["context_length"])
        )
        self._heads, self._size = int(payload["decoder"]["num_key_value_heads"]), int(payload["decoder"]["head_size"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = list(dict.fromkeys((provider, CPU)))  # the CPU's takes what the other one has no kernel for
        self._session = onnxruntime.InferenceSession(folder / MODEL, options, providers=providers)
        self.provider = self._session.get_providers()[0]
        self._inputs = {each.name: KINDS.get(each.type, np.int64) for each in self._session.get_inputs()}

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """`logits` [rows, tokens, vocabulary] in float32."""
        return SimpleNamespace(logits=torch.from_numpy(self.logits(input_ids.numpy())))

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of rows of tokens, each from an empty cache."""
        rows, count = tokens.shape
        given: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.broadcast_to(np.arange(count, dtype=np.int64), tokens.shape),
        }
        empty = (rows, self._heads, 0, self._size)
        inputs = {name: given[name] if name in given else np.zeros(empty, kind) for name, kind in self._inputs.items()}
        result: NDArray[Any] = self._session.run(["logits"], inputs)[0]
        return result.astype(np.float32, copy=False)


class Exported:
    """An exported folder, as the server loads it, and its graph once more for all logits: each loaded when it is first used."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self._folder, self._threads = folder, threads

    @cached_property
    def generation(self) -> Generation:
        return Generation(self._folder, self._threads)

    @cached_property
    def network(self) -> OnnxNetwork:
        return OnnxNetwork(self._folder, threads=self._threads)

    def drop_network(self) -> None:
        """Give its memory back."""
        self.__dict__.pop("network", None)
        gc.collect()


def answer(original: Original, exported: Exported, prompts: Sequence[str], *, max_tokens: int) -> list[Answer]:
    """Compare all logits, then complete each prompt on both sides, greedily and from an empty cache.

    The context may end a completion early. The graph for all logits is dropped before the server's is loaded: a large model
    does not fit into memory once more.
    """
    apart = [_apart(original, exported.network, prompt) for prompt in prompts]
    exported.drop_network()
    generation, result = exported.generation, []
    for prompt, (error, scale) in zip(prompts, apart, strict=True):
        tokens, known = generation.encode(prompt), original.encode(prompt)
        limit = min(max_tokens, generation.context_length - len(tokens))
        completion = generation.complete(tokens, limit)
        expected = original.greedy(known, limit, ends=generation.end_tokens)
        equal = tokens == known and completion.tokens == expected
        result.append(Answer(prompt, completion, expected, equal, logit_error=error, logit_scale=scale))
    return result


def _apart(original: Original, network: OnnxNetwork, prompt: str) -> tuple[float, float]:
    """Largest difference of a logit, and largest logit; of a prompt that is too long, as much as the model takes."""
    known = original.encode(prompt)[: network.config.max_position_embeddings]
    right, ours = original.logits(known), network.logits(np.asarray([known]))
    return float(np.abs(ours - right).max()), float(np.abs(right).max())


def largest(values: Iterable[float]) -> float:
    """NaN where one of them is: Python's own `max` passes over it."""
    return float(np.max(list(values)))


def golden_of(answers: Iterable[Answer]) -> dict[str, Any]:
    """What the exported side answered: golden.json of its folder, by which a server proves what it loaded from there."""
    messages = [{"prompt": a.prompt, "completion": a.onnx.text, "tokens": a.onnx.tokens} for a in answers]
    return {"prompts": messages}


def parity(answers: list[Answer]) -> dict[str, float]:
    """What is published of the proof: largest logit error, and how many completions are equal."""
    return {
        "max_logit_error": largest(one.logit_error for one in answers),
        "logit_scale": largest(one.logit_scale for one in answers),
        "greedy_equal": sum(one.equal for one in answers),
        "greedy_total": len(answers),
    }


LONGEST = 1024
"""Tokens that a model takes at once here, where its checkpoint does not say what it was trained with."""
DECIMALS = 6


@dataclass(frozen=True)
class Sample:
    """Held-out documents in a checkpoint's own tokens."""

    heldout: Heldout
    encoded: Encoded
    context: int
    confidence: float
    samples: int
    seed: int


def read_sample(checkpoint: Path, tokens: Path, *, most_bytes: int, context: int | None = None) -> Sample:
    """The first held-out documents, for windows of `context` tokens at most.

    Raises ValueError when there is none, or the tokenizer cannot write their text.
    """
    config = EvaluationConfig(max_bytes=most_bytes, min_documents=1)
    heldout = read_heldout(tokens, config)
    trained = read_json(checkpoint / "training.json") if (checkpoint / "training.json").is_file() else None
    length = int((trained or {}).get("sequence_length", LONGEST))
    return Sample(
        heldout,
        encode_for(checkpoint, tokens, heldout),
        min(length, context or length),
        config.confidence,
        config.bootstrap_samples,
        config.seed,
    )


def bits_of(network: Any, sample: Sample, rank: Rank) -> NDArray[np.float64]:
    """Bits of each document, shape [documents]. Raises ValueError where a model gives no finite probability."""
    return score(network, sample.encoded, context=context_of(network, sample.context), rank=rank).bits


def bits_a_byte(bits: NDArray[np.float64], sample: Sample) -> float:
    """Rounded to what float32 can carry."""
    return round(bits_per_byte(bits, sample.heldout.byte_counts), DECIMALS)


def interval_of(bits: NDArray[np.float64], sample: Sample) -> Estimate:
    """Bits per byte with the bootstrap interval over documents."""
    return bits_per_byte_interval(
        bits,
        sample.heldout.byte_counts,
        samples=sample.samples,
        confidence=sample.confidence,
        seed=sample.seed,
    )


def share_worse(bits: NDArray[np.float64], original: NDArray[np.float64]) -> float:
    """By how much more bits a model needs for the same text than its original; negative: fewer."""
    return round(float(bits.sum() / original.sum()) - 1.0, DECIMALS)


BEGINNING = 32
"""Tokens of a held-out document that are given as a prompt."""


class Answering(Protocol):
    """What completes prompts greedily, as a server's `Generation` does."""

    context_length: int
    opening: list[int]

    def encode(self, prompt: str) -> list[int]: ...

    def complete(self, prompt: list[int], max_tokens: int, *, measure: bool = False) -> Completion: ...


def reference_of(
    generation: Answering, golden: Sequence[str], sample: Sample | None, *, prompts: int, max_tokens: int
) -> dict[str, Any]:
    """Statistics of the greedy answers to the golden prompts and to `prompts` beginnings of held-out documents."""
    asked = [generation.encode(prompt) for prompt in golden]
    if sample is not None:
        beginnings = map(_beginning, sample.encoded.documents[:prompts])
        asked += [[*generation.opening, *text] for text in beginnings if text]
    results = []
    for tokens in asked:
        limit = min(max_tokens, generation.context_length - len(tokens))
        results.append(measures(len(tokens), generation.complete(tokens, limit, measure=True)))
    columns = {
        "length": [one["completion_tokens"] for one in results],
        **{name: [one[name] for one in results if one[name] is not None] for name in ("entropy", "repetition", "odd")},
    }
    return summary(columns, prompts=len(results), max_tokens=max_tokens)


def _beginning(document: Any) -> list[int]:
    """At most half of a document, without its end."""
    return [int(token) for token in document[: min(BEGINNING, len(document) // 2)]]
