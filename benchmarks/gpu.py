"""What only a GPU shows, by the product's own jobs: `make gpu`, or `python -m benchmarks.gpu`, on a machine that has one.

    python -m benchmarks.gpu [--to FILE] [--only STEP ...] [--megatron FOLDER] [--minutes N]
    python -m benchmarks.gpu --rehearse [--to FILE]

Six minutes on one H100. Every step starts a program of tasks/jobs with torchrun, as a backend does, in a folder of its own, and
has a time limit, so a step that hangs costs no more. What the environment does not hold is skipped by name. What was seen goes
into gpu.md in docs/proof. `--rehearse` runs the same steps on a CPU at a small size, and proves nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.proof import Failed, Proof, Skipped, Step, command, tail
from benchmarks.scratch import scratch
from tasks.common.process import read_json
from tasks.config.engines.registry import ENGINES
from tasks.config.qualification import BenchmarkConfig
from tasks.config.serving import ExportConfig
from tasks.config.training import DeepspeedConfig, ExecutionConfig, MegatronConfig, NetworkConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter
from tasks.hardware.sku import Sku, load_sku
from tasks.qualification.measured import read_measurement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "proof" / "gpu.md"
PACKAGES = ("torch", "deepspeed", "megatron-core", "transformer-engine", "onnxruntime-gpu", "onnxruntime", "vllm")
NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
"""Without which no step runs."""
SKUS = {"H100": "nd96isr_h100_v5", "H200": "nd96isr_h200_v5", "A100": "nd96amsr_a100_v4"}
"""Whose file has a GPU's peak, by what is in the GPU's name."""
BY_THE_SIDE = 0.02
"""Largest relative difference of two losses of one step: bfloat16 sums in another order."""
SAME_LOGITS = 0.02
"""Largest difference of a logit between CUDA and CPU, as a share of the largest logit: float16 in another order."""
STEPS, EVERY = 20, 10
"""Of Megatron-LM."""
PROMPTS = ("def ", "import ", "class ")


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    network: NetworkConfig
    vocabulary: int
    sequence: int
    micro: int
    a_rank: int
    """Samples a step and rank."""
    steps: int
    precision: str
    small: NetworkConfig
    """Of the network that is exported and served."""


LLAMA_1B = NetworkConfig(layers=16, hidden_size=2048, heads=32, kv_heads=8, intermediate_size=8192)
GPU = Size(
    network=LLAMA_1B,
    vocabulary=32_768,
    sequence=4096,
    micro=4,
    a_rank=8,
    steps=8,
    precision="bf16",
    small=NetworkConfig(layers=4, hidden_size=512, heads=8, kv_heads=4, intermediate_size=1408),
)
TINY = NetworkConfig(layers=2, hidden_size=64, heads=4, kv_heads=2, intermediate_size=176)
REHEARSAL = Size(TINY, vocabulary=512, sequence=64, micro=2, a_rank=4, steps=4, precision="fp32", small=TINY)


@dataclass(frozen=True)
class Machine:
    """What the steps run on."""

    name: str
    gpus: int
    """0: the rehearsal, on the CPU."""
    driver: str = ""
    sku: Sku | None = None

    @property
    def ranks(self) -> int:
        return self.gpus or 2

    @property
    def peak(self) -> float | None:
        number = self.sku.specs.get("peak_bf16_tflops") if self.sku else None
        return float(number.value) if number and self.gpus else None


def this_machine(*, rehearse: bool) -> Machine:
    """Raises Skipped where there is no GPU, or nothing that trains."""
    if missing := [name for name in NEEDED if not find_spec(name)]:
        raise Skipped(f"{', '.join(missing)} is not installed: pip install -c constraints.txt -e '.[train]'")
    if rehearse:
        return Machine(f"{os.cpu_count()} cores of {os.uname().machine}", 0, sku=load_sku("local-cpu"))
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise Skipped(f"nvidia-smi shows no GPU on this machine ({error})") from error
    seen = [sys.executable, "-c", "import torch; print(torch.cuda.device_count(), torch.version.cuda)"]
    ran = subprocess.run(seen, capture_output=True, text=True, timeout=120)
    count, _, cuda = ran.stdout.strip().partition(" ")
    if ran.returncode or not lines or not int(count or 0):
        raise Skipped(f"torch {version('torch')} sees no GPU: it is built for CUDA {cuda or 'no version'}")
    name, driver, memory = (cell.strip() for cell in lines[0].split(","))
    sku = next((size for part, size in SKUS.items() if part in name), "local-gpu")
    return Machine(f"{count} x {name}, {memory}", int(count), f"{driver}; torch's CUDA {cuda}", load_sku(sku))


@dataclass
class Bench:
    """A folder in which jobs run. State: the losses of the first training, which others are compared with."""

    folder: Path
    machine: Machine
    size: Size
    megatron: MegatronConfig
    losses: dict[int, float]

    # --- jobs

    def job(
        self, name: str, program: str, settings: Mapping[str, Any], inputs: Mapping[str, Path], *, seconds: float
    ) -> Path:
        """Run a job to its end; returns its folder. Raises Failed with the end of its logs."""
        folder = self.begin(name, settings, inputs)
        code = self.launch(folder, program, seconds=seconds)
        if code or not (folder / "result.json").exists():
            raise Failed(f"{program} ended with code {code}: {self.why(folder)}")
        return folder

    def begin(self, name: str, settings: Mapping[str, Any], inputs: Mapping[str, Path]) -> Path:
        folder = self.folder / name
        folder.mkdir()
        spec = {"settings": settings, "inputs": {known: str(path) for known, path in inputs.items()}}
        (folder / "config.json").write_text(json.dumps(spec))
        return folder

    def launch(
        self, folder: Path, program: str, *, seconds: float, attempt: int = 1, until: Callable[[], bool] = lambda: False
    ) -> int | None:
        ranks = 1 if program == "tasks.jobs.export" else self.machine.ranks
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {"HEADWAY_JOB": str(folder), "HEADWAY_ATTEMPT": str(attempt), "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": str(self.threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if self.machine.gpus else {}
        words, log = [*torchrun, "-m", program], folder / "torchrun.log"
        try:
            return command(words, seconds=seconds, log=log, environment=environment, until=until)
        except Failed as reason:
            raise Failed(f"{reason}; rank 0: {tail(folder / 'logs' / 'rank-0.log')}") from reason

    @property
    def threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.machine.ranks) if self.machine.gpus else 1

    def why(self, folder: Path) -> str:
        errors = [read_json(path) or {} for path in sorted((folder / "errors").glob("*.json"))]
        words = "; ".join(f"{one.get('type')}: {one.get('message')}" for one in errors[:2])
        return words or tail(folder / "torchrun.log", *sorted((folder / "logs").glob("rank-0.log")))

    # --- training

    def training(self, **changed: Any) -> TrainingConfig:
        size = self.size
        first = {"network": size.network, "sequence_length": size.sequence, "micro_batch_size": size.micro}
        batch = size.a_rank * self.machine.ranks
        schedule = {"steps": size.steps, "warmup_steps": 2, "learning_rate": 3e-4, "precision": size.precision}
        return TrainingConfig(**{**first, "global_batch_size": batch, **schedule, **changed})

    def settings(self, training: TrainingConfig, execution: ExecutionConfig, *, every: int) -> dict[str, Any]:
        """As tasks/train.py writes them."""
        peak = {"tflops": self.machine.peak, "of": "bf16 without sparsity"} if self.machine.peak else None
        return {
            "training": training.model_dump(mode="json"),
            "execution": execution.model_dump(mode="json"),
            "checkpoint_every_steps": every,
            "keep_checkpoints": 2,
            "peak": peak,
            **ENGINES[training.engine].job_settings(training, execution),
        }

    def train(
        self, name: str, training: TrainingConfig, execution: ExecutionConfig, *, seconds: float
    ) -> tuple[str, dict[int, float]]:
        """One training without its checkpoints left behind: its speed in words, and its losses by step."""
        ENGINES[training.engine].require_fits(training, execution)
        settings = self.settings(training, execution, every=training.steps)
        program = ENGINES[training.engine].program
        job = self.job(name, program, settings, {"tokens": self.tokens}, seconds=seconds)
        records, result = records_of(job), read_json(job / "result.json") or {}
        shutil.rmtree(job / "checkpoints", ignore_errors=True)  # of a 1 B network 12 GB
        shutil.rmtree(job / "out", ignore_errors=True)
        return speed_of(records, result), {int(one["step"]): float(one["loss"]) for one in records}

    @property
    def tokens(self) -> Path:
        """Tokens that a network can learn a little of: each follows from the one before, but for one in ten."""
        folder, words = self.folder / "tokens", self.size.vocabulary
        if folder.exists():
            return folder
        (folder / "tokenizer").mkdir(parents=True)
        generator = np.random.default_rng(0)
        need = self.size.sequence * (self.size.a_rank * self.machine.ranks * max(self.size.steps, STEPS) + 1)
        values = generator.integers(0, words - 1, size=need)
        follows = generator.random(need) > 0.1
        for place in np.flatnonzero(follows[1:]) + 1:
            values[place] = (values[place - 1] * 5 + 3) % (words - 1)
        return write_tokens(folder, values.tolist(), words)

    # --- steps

    def qualify(self, seconds: float) -> str:
        """Compute and memory of each GPU, by the qualification's own job."""
        machine = self._measured("qualify", ("compute", "memory"), seconds)
        return rates_of(machine)

    def nccl(self, seconds: float) -> str:
        """All collectives between this machine's ranks, the results checked."""
        if self.machine.gpus == 1:
            raise Skipped("collectives need two GPUs, and this machine has one")
        measured = self._measured("nccl", ("collectives",), seconds)
        bad = [f"{one.collective}: {one.said or one.status}" for one in measured.sweeps if one.status != "measured"]
        bad += [f"{one.collective}: wrong results" for one in measured.sweeps if any(row.wrong for row in one.rows)]
        if bad or not measured.sweeps:
            raise Failed("; ".join(bad) or "no collective was measured")
        words = []
        for one in measured.sweeps:
            row = max(one.rows, key=lambda row: row.busbw or 0.0)
            words.append(f"{one.collective} {row.busbw or 0.0:,.1f} GB/s of bus bandwidth at {row.bytes:,} bytes")
        return f"{measured.sweeps[0].backend}: {', '.join(words)}"

    def _measured(self, name: str, checks: tuple[str, ...], seconds: float) -> Any:
        small = {} if self.machine.gpus else {"matmul_size": 128, "largest_megabytes": 1, "rounds": 1}
        benchmark = BenchmarkConfig.model_validate({"checks": checks, "seconds": 0.5, **small})
        assert self.machine.sku
        settings = {
            "benchmark": benchmark.model_dump(mode="json"),
            "sku": self.machine.sku.model_dump(mode="json"),
            "training": self.training().model_dump(mode="json"),
            "threads": self.threads,
            "vocab_size": self.size.vocabulary,
        }
        job = self.job(name, "tasks.jobs.benchmark", settings, {}, seconds=seconds)
        return read_measurement(job / "out", nodes=1, ranks_per_node=self.machine.ranks)

    def mfu(self, seconds: float) -> str:
        execution = ExecutionConfig(recompute="selective")
        seen, self.losses = self.train("mfu", self.training(), execution, seconds=seconds)
        return f"{seen}; {falling(self.losses)}"

    def fsdp(self, seconds: float) -> str:
        execution = ExecutionConfig(parallel="fsdp", recompute="selective")
        seen, losses = self.train("fsdp", self.training(), execution, seconds=seconds)
        return f"{seen}; {self.beside(losses)}"

    def zero(self, seconds: float) -> str:
        if not find_spec("deepspeed"):
            raise Skipped("deepspeed is not installed: pip install -e '.[deepspeed]'")
        execution = ExecutionConfig(recompute="selective", deepspeed=DeepspeedConfig(zero_stage=2, offload="cpu"))
        seen, losses = self.train("zero", self.training(engine="deepspeed"), execution, seconds=seconds)
        return f"{seen}; {self.beside(losses)}"

    def beside(self, losses: Mapping[int, float]) -> str:
        """How far losses are from those of the first training. Raises Failed beyond BY_THE_SIDE."""
        if not self.losses:
            return f"{falling(losses)}; the step mfu, whose losses these would be compared with, did not pass"
        apart = max(abs(losses[step] - loss) / loss for step, loss in self.losses.items())
        if not apart <= BY_THE_SIDE:
            raise Failed(f"losses differ by {apart:.1%} from those of the step mfu, more than {BY_THE_SIDE:.0%}")
        return f"losses within {apart:.2%} of those of the step mfu"

    def megatron_lm(self, seconds: float) -> str:
        """Killed after its first checkpoint, started again, and finished."""
        if not (Path(self.megatron.checkout) / "pretrain_gpt.py").is_file():
            raise Skipped(
                f"there is no pretrain_gpt.py in {self.megatron.checkout}: name a clone with --megatron FOLDER"
            )
        training = self.training(engine="megatron", steps=STEPS, network=self.size.small)
        execution = ExecutionConfig(megatron=self.megatron)
        ENGINES["megatron"].require_fits(training, execution)
        job = self.begin("megatron", self.settings(training, execution, every=EVERY), {"tokens": self.small_tokens})
        saved = lambda: any((job / "checkpoints").glob(f"step-*{EVERY}/attempt-*/manifest.json"))  # noqa: E731
        program, half = ENGINES["megatron"].program, seconds / 2
        code = self.launch(job, program, seconds=half, until=saved)
        if code is not None:
            raise Failed(f"Megatron-LM ended with code {code} before it was to be killed: {self.why(job)}")
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout=30)  # they die with torchrun, one by one
        first = len(records_of(job))
        code = self.launch(job, program, seconds=half, attempt=2)
        steps = [int(one["step"]) for one in records_of(job)]
        result = read_json(job / "result.json")
        lacking = "" if find_spec("megatron.bridge") or self.megatron.converter else "Megatron-Bridge is not installed"
        if steps != list(range(1, STEPS + 1)) or (code and not lacking) or (result is None and not lacking):
            raise Failed(f"steps {steps}, code {code}: {self.why(job)}")
        again = f"killed at step {first}, resumed at {result['resumed_from_step'] if result else EVERY}, {STEPS} steps"
        return f"{again}; {f'not converted: {lacking}' if lacking else 'converted to a Hugging Face folder'}"

    # --- serving

    @property
    def small_tokens(self) -> Path:
        """Headway's own sources under a tokenizer of 512 words, of which a tenth is held out."""
        folder = self.folder / "small-tokens"
        if folder.exists():
            return folder
        texts = [path.read_text() for path in sorted((ROOT / "tasks").rglob("*.py"))]
        tokenizer = small_tokenizer(texts)
        folder.mkdir()
        tokenizer.save_pretrained(folder / "tokenizer")
        values = [token for text in texts for token in [*tokenizer.encode(text), 0]]
        return write_tokens(folder, values, len(tokenizer))

    def exported(self, seconds: float) -> Path:
        """The folder of a small network that was trained and exported, once. Raises Failed."""
        folder = self.folder / "export"
        if not folder.exists():
            steps = 200 if self.machine.gpus else 10
            training = self.training(network=self.size.small, sequence_length=128, steps=steps, learning_rate=2e-3)
            settings = self.settings(training, ExecutionConfig(), every=steps)
            trained = self.job("small", "tasks.jobs.train", settings, {"tokens": self.small_tokens}, seconds=seconds)
            export = ExportConfig(golden_prompts=PROMPTS, golden_tokens=16, variants=(), speed_seconds=0.1)
            told = {"export": export.model_dump(mode="json"), "threads": self.threads, "measured": 128}
            self.job("export", "tasks.jobs.export", told, {"checkpoint": trained / "out"}, seconds=seconds)
        if not (folder / "result.json").exists():
            raise Failed("the export failed before")
        return folder / "out"

    def onnx(self, seconds: float) -> str:
        """The exported graph in float16 on CUDA, beside the same graph on the CPU."""
        provider = "CUDAExecutionProvider" if self.machine.gpus else "CPUExecutionProvider"
        self.exported(seconds)
        seen = self.answer("onnx", provider, seconds)
        if "skipped" in seen:
            raise Skipped(seen["skipped"])
        if seen["provider"] != provider:
            raise Failed(f"ONNX Runtime took {seen['provider']} instead of {provider}")
        if not seen["error"] <= SAME_LOGITS * seen["scale"]:
            raise Failed(f"logits differ by {seen['error']:.3g} from the CPU's, of at most {seen['scale']:.3g}")
        return f"{provider}: logits within {seen['error']:.2g} of the CPU's, of at most {seen['scale']:.3g}"

    def vllm(self, seconds: float) -> str:
        """The Hugging Face folder of a training, loaded by vLLM, and its greedy answers beside the exported model's."""
        if not find_spec("vllm"):
            raise Skipped("vllm is not installed")
        seen = self.answer("vllm", self.exported(seconds) / "golden.json", seconds)
        if not seen["tokens"] or seen["first"] < 1:
            raise Failed(f"vLLM's answers begin otherwise than the exported model's: {seen}")
        return f"vLLM {seen['version']}: {seen['same']} of {seen['tokens']} greedy tokens are the exported model's"

    def answer(self, runtime: str, given: str | Path, seconds: float) -> dict[str, Any]:
        """What gpu_models.py says of the small network that was trained."""
        log = self.folder / f"{runtime}.log"
        words = [sys.executable, "-m", "benchmarks.gpu_models", runtime, self.folder / "small" / "out", given]
        if code := command(words, seconds=seconds, log=log, environment={"PYTHONPATH": str(ROOT)}):
            raise Failed(f"it ended with code {code}: {tail(log)}")
        output: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return output


def small_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def write_tokens(folder: Path, values: list[int], words: int) -> Path:
    """One document, as the stage preprocess writes tokens; a tenth of it again as the held-out split."""
    splits = {}
    for split, part in (("train", values), ("heldout", values[: len(values) // 10])):
        writer = TokenWriter(folder / f"{split}_text_document", words)
        writer.add_document(part)
        documents, count = writer.close()
        splits[split] = {"documents": documents, "tokens": count, "bytes": count}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": words, "eod_id": 0, "splits": splits}))
    return folder


def records_of(job: Path) -> list[dict[str, Any]]:
    """The last record of each step."""
    log = job / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    last = {int(line["step"]): line for line in lines if "loss" in line}
    return [last[step] for step in sorted(last)]


def speed_of(records: list[dict[str, Any]], result: Mapping[str, Any]) -> str:
    """Medians of the steps after the first two, and the memory."""
    steady = records[2:] or records
    words = [f"{median(one['tokens_per_second'] for one in steady):,.0f} tokens/s"]
    words.append(f"{median(one['tflops_per_rank'] for one in steady):,.3g} TFLOP/s a rank")
    if all("mfu" in one for one in steady):
        words.append(f"MFU {median(one['mfu'] for one in steady):.1%}")
    if memory := result.get("time", {}).get("gpu_memory_gib"):
        words.append(f"{memory:.1f} GiB of GPU memory at most")
    return ", ".join(words)


def falling(losses: Mapping[int, float]) -> str:
    """The first and the last loss. Raises Failed when one is no number, or the last is above the first."""
    values = [losses[step] for step in sorted(losses)]
    if not all(map(math.isfinite, values)) or values[-1] >= values[0]:
        raise Failed(f"the loss does not fall: {', '.join(f'{loss:.3f}' for loss in values)}")
    return f"loss {values[0]:.3f} to {values[-1]:.3f} in {len(values)} steps"


def rates_of(measured: Any) -> str:
    """What each rank reached. Raises Failed when one measured nothing."""
    probes = [probe for report in measured.ranks for probe in report.probes]
    bad = [probe for probe in probes if probe.status != "measured"]
    if bad or not probes:
        raise Failed(f"not measured: {', '.join(f'{one.check}: {one.said or one.status}' for one in bad) or 'nothing'}")
    least: dict[str, Any] = {}
    for probe in probes:
        if probe.check not in least or probe.measured < least[probe.check].measured:
            least[probe.check] = probe
    return "of the slowest rank: " + ", ".join(f"{one.check} {one.measured:,.4g} {one.unit}" for one in least.values())


def steps_of(bench: Bench) -> list[Step]:
    """In their order, which is that of their worth: a time limit cuts the last ones."""
    return [
        Step("qualify", "the qualification measures compute and memory of each GPU", bench.qualify, 60),
        Step("nccl", "the qualification measures NCCL's collectives and checks their results", bench.nccl, 60),
        Step("mfu", "a 1 B Llama trains at sequence 4096 in bfloat16", bench.mfu, 120),
        Step("fsdp", "FSDP2 trains the same network to the same losses", bench.fsdp, 120),
        Step("zero", "DeepSpeed's ZeRO 2 with state on the host does too", bench.zero, 120),
        Step("megatron", "Megatron-LM is killed, resumed, and finishes 20 steps", bench.megatron_lm, 120),
        Step("onnx", "an exported network runs on ONNX Runtime's CUDA provider", bench.onnx, 120),
        Step("vllm", "vLLM serves the Hugging Face folder that a training wrote", bench.vllm, 120),
    ]


def versions() -> str:
    result = []
    for package in PACKAGES:
        try:
            result.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Python {sys.version.split()[0]}, {', '.join(result)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in steps_of(Bench(Path(), Machine("", 0), REHEARSAL, MegatronConfig(), {}))]
    parser.add_argument("--rehearse", action="store_true", help="the same steps on the CPU, at a small size")
    parser.add_argument("--to", type=Path, help=f"the page; by default {PAGE.relative_to(ROOT)}, of a rehearsal none")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of {', '.join(names)}")
    parser.add_argument("--megatron", default="/opt/megatron-lm", metavar="FOLDER", help="a clone of Megatron-LM")
    parser.add_argument("--converter", nargs="+", default=[], metavar="WORD", help="execution.megatron.converter")
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="time limit of all steps together; a rehearsal has 60"
    )
    given = parser.parse_args()
    given.minutes = 60.0 if given.rehearse else given.minutes
    return given


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        machine = this_machine(rehearse=given.rehearse)
    except Skipped as reason:
        print(f"error: {reason}. `make gpu` needs a GPU; --rehearse takes its steps on the CPU", file=sys.stderr)
        return 6
    proof = Proof(given.minutes * 60)
    local = {"transformer_impl": "transformer_engine" if find_spec("transformer_engine") else "local"}
    megatron = MegatronConfig(checkout=given.megatron, converter=tuple(given.converter), **local)
    with scratch() as folder:
        os.environ["TMPDIR"] = str(folder)  # torchrun leaves a folder each time
        bench = Bench(folder, machine, REHEARSAL if given.rehearse else GPU, megatron, {})
        for step in steps_of(bench):
            if not given.only or step.name in given.only:
                proof.take(replace(step, seconds=step.seconds if machine.gpus else math.inf))
    facts = {"machine": machine.name, "driver": machine.driver or "none: a rehearsal", "versions": versions()}
    page = proof.page("Proof on a GPU" if machine.gpus else "Rehearsal on a CPU", introduction(machine), facts)
    if target := given.to or (None if given.rehearse else PAGE):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page)
    print(page)
    return int(bool(proof.failed))


def introduction(machine: Machine) -> str:
    if not machine.gpus:
        return "`python -m benchmarks.gpu --rehearse` wrote this page. It proves nothing about GPUs."
    return "`make gpu` wrote this page, by [benchmarks/gpu.py](../../benchmarks/gpu.py): every step is a program of tasks/jobs."


if __name__ == "__main__":
    sys.exit(main())
