"""What rank 0 tells of training: a record a step in `metrics.jsonl`, the bar of progress, and the figures of the whole run.

What the records of all attempts add up to is tasks/planning/spent.py. Who shows it: the supervisor forwards it to MLflow, the
terminal and the flow run (tasks/orchestration/stage_context.py). See docs/training.md.

Where a step's time goes: waiting for data, computing, communicating, standing still. One clock a rank. A step lasts from the end
of the one before to its own, so every second of training is in one step.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.jobs.node.elastic import process_age
from tasks.jobs.node.runtime import Rank
from tasks.planning.case import Network
from tasks.planning.counts import model_flops_per_token
from tasks.planning.spent import beside_plan, goodput

Part = Literal["data", "compute", "communication", "checkpoint", "heldout", "profile", "rollback"]
STANDSTILL: tuple[Part, ...] = ("checkpoint", "heldout", "profile", "rollback")
"""Parts in which a rank does nothing for the step itself: a step's speed is without them."""


@dataclass(frozen=True)
class Step:
    """What a step took, in seconds."""

    all: float
    parts: Mapping[Part, float]

    @property
    def own(self) -> float:
        """Without standing still."""
        return self.all - sum(self.parts.get(part, 0.0) for part in STANDSTILL)


class Meter:
    """Seconds of the step that is under way, by part; what is in no part is the rest. A part inside another is taken from it."""

    def __init__(self) -> None:
        self.began = self._since = time.monotonic()
        self.seconds: dict[Part, float] = {}
        self._parts: list[Part] = []
        self._turned: torch.cuda.Event | None = None

    def start(self) -> None:
        """A new step begins; no part may be open."""
        self.end()

    def end(self) -> Step:
        """The step is over: what it took. The next one begins at the same moment."""
        now = time.monotonic()
        done = Step(now - self.began, self.seconds)
        self.began, self._since, self.seconds = now, now, {}
        return done

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What happens inside is part of this."""
        self._charge()
        self._parts.append(name)
        try:
            yield
        finally:
            self._charge()
            self._parts.pop()
            if self._turned is not None:
                ended = torch.cuda.Event(enable_timing=True)
                ended.record()
                ended.synchronize()
                moved = min(float(self._turned.elapsed_time(ended)) / 1000, self.seconds[name])
                self._turned = None
                self._add(name, -moved)
                self._add("communication", moved)

    def turn(self, name: Part) -> None:
        """From here on, what is left of the open part is this one: called when the last gradients are ready (a hook of DDP).

        On a GPU nothing is done yet when this is called, so the moment is an event of the GPU, which the part's end waits for.
        """
        if torch.cuda.is_initialized():
            self._turned = torch.cuda.Event(enable_timing=True)
            self._turned.record()
            return
        self._charge()
        self._parts[-1] = name

    def _charge(self) -> None:
        now = time.monotonic()
        if self._parts:
            self._add(self._parts[-1], now - self._since)
        self._since = now

    def _add(self, name: Part, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


# A profile of some steps by torch's profiler: `profile/` in the job's folder, of rank 0.
#
# `steps-A-B.json.gz` is a trace for https://ui.perfetto.dev or chrome://tracing, `steps-A-B.txt` the operations that
# took longest. Steps that are profiled are slower. See docs/training.md.


ROWS = 40


class Profile:
    """State: the profiler, while it records."""

    def __init__(self, folder: Path, execution: ExecutionConfig, *, rank: int, cuda: bool) -> None:
        self._folder, self._cuda = folder, cuda
        self._first = None if rank else execution.profile_from
        self._last = (execution.profile_from or 0) + execution.profile_steps - 1
        self._at_work: profile | None = None
        self._began = 0

    def before(self, step: int) -> None:
        """A step begins; a run that is resumed within the range records the rest of it."""
        if self._first and self._first <= step <= self._last and not self._at_work:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._at_work, self._began = profile(activities=activities, profile_memory=True), step
            self._at_work.start()

    def after(self, step: int, *, over: bool) -> None:
        """A step is done; `over`: none follows."""
        if self._at_work and (step >= self._last or over):
            self._at_work.stop()
            name = f"steps-{self._began}-{step}"
            self._folder.mkdir(exist_ok=True)
            self._at_work.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            order = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
            table = self._at_work.key_averages().table(sort_by=order, row_limit=ROWS)
            (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
            self._at_work = None


# How many floating-point operations a token costs the network that is trained, and by which convention they are
# counted.
#
# The formulas are tasks/planning/counts.py; "MFU" means little without the convention, so it is told beside it. See
# docs/training.md.


FROZEN = 2 / 3
"""Under LoRA the base's weights get no gradient: forward and the gradient of activations are four of six operations."""


class Flops(NamedTuple):
    """Operations a token, forward and backward, of the whole network; recomputation is not counted."""

    per_token: float
    convention: str
    """`megatron`: Megatron-LM's num_floating_point_operations, causal attention counted as half of the square. `6n`: six a
    parameter, no attention, for networks of another shape. With `, frozen base`: two thirds of it."""


def flops_of(network: nn.Module, config: TrainingConfig, parameters: int) -> Flops:
    """What a token of `config.sequence_length` costs; `parameters` are all of the network's."""
    shape = _shape(getattr(network, "config", None))
    if shape is None:
        counted = Flops(6 * parameters, "6n")
    else:
        vocab_size = int(network.config.vocab_size)  # type: ignore[union-attr, arg-type]
        per_token = model_flops_per_token(Network.of_config(shape, vocab_size), config.sequence_length)
        counted = Flops(per_token, "megatron")
    return Flops(counted.per_token * FROZEN, f"{counted.convention}, frozen base") if config.lora.rank else counted


def _shape(payload: Any) -> NetworkConfig | None:
    """The shape that transformers' configuration tells; None for a family whose layers are not counted."""
    family = getattr(payload, "model_type", "")
    if family not in ("llama", "gpt2"):
        return None
    heads, hidden = payload.num_attention_heads, payload.hidden_size
    return NetworkConfig(
        architecture=family,
        layers=payload.num_hidden_layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=getattr(payload, "num_key_value_heads", None) or heads,
        intermediate_size=getattr(payload, "intermediate_size", None)
        or getattr(payload, "n_inner", None)
        or 4 * hidden,
        tie_embeddings=payload.tie_word_embeddings,
    )


# What training takes of the machine of rank 0: processors, memory, its GPU. Read every ten seconds, from counters of
# the OS.
#
# The names are those that MLflow shows under "System metrics". Whether a machine is healthy is tasks/jobs/qualify and
# tasks/jobs/node/probes.py.


LOOK_SECONDS = 10.0
MEBI = 2**20


class MachineUse:
    """State: the counters at the last look."""

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self._clock = device, clock
        self._looked = clock()
        self._own = _own_seconds()
        psutil.cpu_percent()  # which counts from its last call

    def look(self) -> dict[str, float]:
        """What was used since the last look; empty before ten seconds are over."""
        passed = self._clock() - self._looked
        if passed < LOOK_SECONDS:
            return {}
        own, memory = _own_seconds(), psutil.virtual_memory()
        result = {
            "cores_used": (own - self._own) / passed,
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": (memory.total - memory.available) / MEBI,
            "system/system_memory_usage_percentage": memory.percent,
            **_gpu(self.device),
        }
        self._looked, self._own = self._clock(), own
        return {name: round(value, 3) for name, value in result.items()}


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """The most that this rank had at once: of the machine's memory, and of its GPU's as torch's allocator counts it."""
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    result = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        result["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return result


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system


def _gpu(device: torch.device) -> dict[str, float]:
    """Of the GPU of rank 0; its counters need NVIDIA's or AMD's Python package, and are left out without it."""
    if device.type != "cuda":
        return {}
    free, whole = torch.cuda.mem_get_info(device)
    name = f"system/gpu_{device.index or 0}"
    result = {f"{name}_memory_usage_megabytes": (whole - free) / MEBI}
    try:
        result[f"{name}_utilization_percentage"] = float(torch.cuda.utilization(device))
        result[f"{name}_power_usage_watts"] = torch.cuda.power_draw(device) / 1000
    except Exception:  # noqa: BLE001 NVML's errors have no common class here, and a counter is worth no training
        pass
    return result


PROGRESS_SECONDS = 1.0
DECIMALS = 6


class Teller:
    """State: when the bar was last moved, and what the machine used."""

    def __init__(self, rank: Rank, flops: Flops, *, tokens_a_step: int, steps: int, device: torch.device) -> None:
        self._rank, self._flops, self._tokens, self._steps = rank, flops, tokens_a_step, steps
        self._peak: Mapping[str, Any] = rank.settings.get("peak") or {}
        self._planned = float(rank.settings.get("planned_step_seconds") or 0.0)
        self._use, self._shown, self._first = MachineUse(device), 0.0, True
        self._ended = time.time()

    def go_on(self, rank: Rank) -> None:
        """Records are of another attempt from now on: training went back to a checkpoint."""
        self._rank = rank

    def tell(self, step: int, meter: Meter, *, seconds_left: float, **values: Any) -> None:
        """One step's record, by rank 0; the next step begins."""
        done = meter.end()
        speed = self._speed(self._tokens, done.own, done.own * self._rank.world_size)
        # On the first step of a process: how long it took to come so far.
        first, self._first = self._first, False
        output = {
            **values,
            **({"start_seconds": max(0.0, process_age() - done.all)} if first else {}),
            **speed,
            **_seconds(done),
            **self._beside_plan(done.own),
            **self._use.look(),
        }
        self._rank.metrics(step=step, **output, seconds_left=seconds_left)
        if time.monotonic() - self._shown >= PROGRESS_SECONDS or step == self._steps:
            self._shown = time.monotonic()
            loss = f"loss {output['loss']:.3f}" if "loss" in output else "a batch left out"
            words = [loss, f"{output['tokens_per_second']:,.0f} tokens/s"]
            if "mfu" in output:
                words.append(f"MFU {output['mfu']:.0%}")
            if "plan_error" in output:
                words.append(beside_plan(output["plan_error"]))
            if "heldout_bits_per_byte" in output:
                words.append(f"held-out {output['heldout_bits_per_byte']:.3f} bits per byte")
            if "store_behind_seconds" in output:
                words.append(
                    f"store {output['store_behind_steps']} steps, {output['store_behind_seconds']:.0f} s behind"
                )
            self._rank.progress(step, self._steps, ", ".join(words), seconds_left=seconds_left)

    def over(self) -> None:
        """The last checkpoint is there: what follows is publishing, and no part of training's time."""
        self._ended = time.time()

    def _speed(self, tokens: float, seconds: float, rank_seconds: float) -> dict[str, float]:
        """Rates of so many tokens; `rank_seconds` is the sum over all ranks."""
        each = tokens / rank_seconds
        tflops = each * self._flops.per_token / 1e12
        result = {"tokens_per_second": tokens / seconds, "tokens_per_second_per_rank": each, "tflops_per_rank": tflops}
        return {**result, "mfu": tflops / self._peak["tflops"]} if self._peak else result

    def summary(self, every: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Figures of the whole run: `every` record of all attempts, and the `last` one of each step."""
        timed = [record for record in last if "step_seconds" in record]
        own = sum(self._tokens / record["tokens_per_second"] for record in last)
        of_ranks = sum(self._tokens / record["tokens_per_second_per_rank"] for record in last)  # their number may vary
        whole = sum(record["step_seconds"] for record in timed)
        parts = ("data", "communication", "checkpoint")
        shares = {f"{part}_share": sum(r.get(f"{part}_seconds", 0.0) for r in timed) / whole for part in parts if whole}
        heldout = [record["heldout_bits_per_byte"] for record in last if "heldout_bits_per_byte" in record]
        more = {"heldout_bits_per_byte": heldout[-1]} if heldout else {}
        spent = goodput(every, ended=self._ended)
        # the first step of a process compiles, and reads what others find in memory
        steady = [self._tokens / r["tokens_per_second"] for r in last if "start_seconds" not in r] or [own / len(last)]
        beside = self._beside_plan(statistics.median(steady))
        return {
            **self._speed(self._tokens * len(last), own, of_ranks),
            **shares,
            **beside,
            **more,
            "goodput": spent.share,
        }

    def _beside_plan(self, seconds: float) -> dict[str, float]:
        """By how much a step took longer than planned: 0.1 is a tenth; nothing where there is no plan."""
        return {"plan_error": seconds / self._planned - 1} if self._planned else {}

    def time(self, every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What its time went to, in seconds and as shares, and by which convention and peak the rates are meant."""
        spent = goodput(every, ended=self._ended)
        return {
            "seconds": asdict(spent),
            "causes": spent.causes,
            "flops_per_token": self._flops.per_token,
            "flops_convention": self._flops.convention,
            "peak": dict(self._peak),
            **peak_memory_gib(self._use.device),
        }


def _seconds(done: Step) -> dict[str, float]:
    parts = {f"{part}_seconds": round(seconds, DECIMALS) for part, seconds in done.parts.items()}
    return {"step_seconds": round(done.all, DECIMALS), **parts}
