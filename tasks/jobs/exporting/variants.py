"""Smaller variants of an exported model, each a whole folder of its own, measured against the checkpoint on held-out text.

One that needs more bits for the same text than the settings allow, or that the CPU provider does not run, is taken out of the
artifact again, and `variants.json` tells why. No speeds in that file: what is published is the same for the same inputs. Each
variant has a golden.json of its own: what it answers itself, which need not be what the model answers.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    NotImplemented,
    RuntimeException,
)

from tasks.common.process import write_json
from tasks.config.serving import ExportConfig
from tasks.formats.onnx_data import require_plain_folder
from tasks.jobs.exporting.comparison import (
    Exported,
    Original,
    Sample,
    answer,
    bits_a_byte,
    bits_of,
    golden_of,
    parity,
    share_worse,
)
from tasks.jobs.exporting.graph import DATA, MODEL, build
from tasks.jobs.node.runtime import Rank

# How fast an exported model is beside PyTorch: pairs of runs, one after the other, on the same prompt and threads.
#
# The machine may be busy with other things, so a pair's two runs are next to each other, the order turns from pair to
# pair, and what counts is the median of the pairs' ratios, with an interval that assumes nothing of their distribution.


FEWEST_PAIRS = 5
MOST_PAIRS = 15
DOUBT = 0.05
"""Of the interval of the median."""


@dataclass(frozen=True)
class Race:
    """Seconds a token of both sides, pair by pair."""

    onnx: tuple[float, ...]
    torch: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return sorted(ours / theirs for ours, theirs in zip(self.onnx, self.torch, strict=True))

    def told(self) -> dict[str, float]:
        """`slowdown`: time of ONNX Runtime over that of PyTorch for a token, and the ends of its interval; tokens a second."""
        ratios = self.ratios
        beyond = outside(len(ratios))
        return {
            "slowdown": median(ratios),
            "slowdown_low": ratios[beyond],
            "slowdown_high": ratios[-1 - beyond],
            "tokens_per_second_onnx": 1 / median(self.onnx),
            "tokens_per_second_torch": 1 / median(self.torch),
        }


def race(onnx: Callable[[], int], torch: Callable[[], int], *, seconds: float) -> Race:
    """Run both in turns for about so many seconds, but at least FEWEST_PAIRS times; each says how many tokens it made.

    The first run of each warms up, and is not counted.
    """
    sides = (onnx, torch)
    for side in sides:
        side()
    taken: tuple[list[float], list[float]] = ([], [])
    ends = time.monotonic() + seconds
    while len(taken[0]) < FEWEST_PAIRS or (len(taken[0]) < MOST_PAIRS and time.monotonic() < ends):
        first = len(taken[0]) % 2
        for turn in (first, 1 - first):
            began = time.perf_counter()
            tokens = sides[turn]()
            taken[turn].append((time.perf_counter() - began) / max(tokens, 1))
    return Race(tuple(taken[0]), tuple(taken[1]))


def outside(pairs: int) -> int:
    """How many of the sorted values lie below the interval of their median, and as many above (a sign test turned round)."""
    beyond = 0
    while 2 * sum(comb(pairs, below) for below in range(beyond + 2)) <= DOUBT * 2**pairs:
        beyond += 1
    return beyond


# Variants in half the bits: matrices are stored as float16 or bfloat16, and made float32 when the graph is loaded.
#
# The CPU provider has no attention with a cache in half precision (GroupQueryAttention is float32 there), so the graph
# that the builder makes for `fp16` cannot be served on a CPU. This one can: the file is half as large, memory and speed
# are those of fp32.


KINDS = {
    "fp16": (np.dtype(np.float16), TensorProto.FLOAT16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
}
STORED = "/stored"


def halve(folder: Path, kind: str) -> None:
    """Rewrite an fp32 graph and its data. Raises ValueError for weights that are beyond the range of the kind."""
    model = onnx.load(folder / MODEL)
    dtype, element = KINDS[kind]
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        values = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore"):
            stored = values.astype(dtype)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise ValueError(f"{tensor.name} has weights beyond the range of {kind}")
        name = tensor.name
        tensor.Clear()
        tensor.CopyFrom(helper.make_tensor(name + STORED, element, values.shape, stored.tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [name + STORED], [name], name=f"{name}/Cast", to=TensorProto.FLOAT))
    for place, node in enumerate(casts):
        model.graph.node.insert(place, node)
    (folder / DATA).unlink()
    onnx.save(model, folder / MODEL, save_as_external_data=True, location=DATA, size_threshold=1024)


FOLDER = "variants"
FILE = "variants.json"
REFUSALS = (ValueError, NotImplementedError, Fail, InvalidArgument, InvalidGraph, NotImplemented, RuntimeException)
"""How the builder, the decoder and ONNX Runtime say that they do not build or run a graph."""


@dataclass(frozen=True)
class Measured:
    """What a variant is compared with: the checkpoint, and its bits of each held-out document."""

    checkpoint: Path
    """Loaded for each variant, once it is built: the builder needs the memory."""
    bits: NDArray[Any]
    sample: Sample
    context: int | None = None
    """Tokens that it declares."""


def onnx_bytes(folder: Path) -> int:
    """Size of the graph and its data."""
    return sum((folder / name).stat().st_size for name in (MODEL, DATA))


def make_variants(
    against: Measured, config: ExportConfig, rank: Rank, *, threads: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Build each variant below the output, and keep those that pass. What is published of them, and their metrics, speeds too."""
    payload: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for number, name in enumerate(config.variants):
        rank.progress(number, len(config.variants), f"the variant {name}")
        folder = rank.output / FOLDER / name
        try:
            gc.collect()  # of what the last variant left
            if name in KINDS:
                build(against.checkpoint, folder, precision="fp32", context=against.context)
                halve(folder, name)
            else:
                build(against.checkpoint, folder, precision=name, context=against.context)
            require_plain_folder(folder)
            gc.collect()  # and the builder
            payload[name], speeds = _measure(folder, against, config, rank, threads=threads)
        except REFUSALS as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            payload[name], speeds = {"passed": False, "why": f"it does not run here: {why}"}, {}
        if not payload[name]["passed"]:
            shutil.rmtree(folder, ignore_errors=True)
        numbers = {key: value for key, value in payload[name].items() if isinstance(value, int | float)}
        metrics |= {f"{name}.{key}": float(value) for key, value in {**numbers, **speeds}.items()}
    return {"limit": config.max_loss_of_variant, "variants": payload}, metrics


def _measure(
    folder: Path, against: Measured, config: ExportConfig, rank: Rank, *, threads: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """What a variant loses, and how fast it is beside PyTorch. Its own golden answers are laid beside it."""
    original, exported = Original(against.checkpoint), Exported(folder, threads=threads)
    bits = bits_of(exported.network, against.sample, rank)
    answers = answer(original, exported, config.golden_prompts, max_tokens=config.golden_tokens)
    write_json(folder / "golden.json", golden_of(answers))
    loss = share_worse(bits, against.bits)
    passed = loss <= config.max_loss_of_variant
    result = {
        "passed": passed,
        "why": "" if passed else f"it needs {loss:.2%} more bits, and may need {config.max_loss_of_variant:.2%}",
        "bits_per_byte": bits_a_byte(bits, against.sample),
        "loss": loss,
        "onnx_bytes": onnx_bytes(folder),
        **parity(answers),
    }
    tokens = exported.generation.encode(config.golden_prompts[0])
    speeds = race(
        lambda: len(exported.generation.complete(tokens, config.golden_tokens).tokens),
        lambda: len(original.greedy(tokens, config.golden_tokens, ends=exported.generation.end_tokens)),
        seconds=config.speed_seconds / 2,
    ).told()
    return result, speeds
