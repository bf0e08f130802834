"""The engine `deepspeed`: our network, data and loop, with optimizer state, gradients and weights divided by ZeRO.

What DeepSpeed is told is tasks/config/engines/deepspeed.py.
See docs/training.md, "DeepSpeed".
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load, save_file
from torch import Tensor, nn

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import write_json
from tasks.jobs.checkpoint.files import Manifest, place_of
from tasks.jobs.checkpoint.snapshot import FolderSaver, generators, take_generators
from tasks.jobs.checkpoint.writer import OWN
from tasks.jobs.data.samples import Batch, Shares
from tasks.jobs.node.elastic import newcomers_seed
from tasks.jobs.training.engine import Saving, Setting
from tasks.jobs.training.metrics_logger import Meter
from tasks.jobs.training.network import adamw, answers_a_rank, next_token_loss, parameter_count
from tasks.jobs.training.parallel import own_device, recompute
from tasks.jobs.training.starting import BASE_LAYER, load_base, starting_network, write_network

# DeepSpeed's own checkpoint files: written by DeepSpeed, read only as they were hashed, and never unpickled freely.
#
# Who hashes and commits them is tasks/jobs/checkpoint/snapshot.py. torch's format is a pickle inside: `weights_only`
# admits tensors, plain values and the few classes of NAMED, so a file that was made to run code is refused, whatever
# its manifest says.


# A checkpoint of DeepSpeed taken over by another number of ranks, or under another ZeRO stage.
#
# DeepSpeed itself refuses that. Every rank reads all files, puts each weight and its moments together, and takes its
# own part of them: memory for the whole state on the host of each rank, once, at the start.


MOMENTS = ("exp_avg", "exp_avg_sq")
Whole = dict[str, dict[str, Tensor]]
"""By name of the weight: its `weight` and AdamW's moments, float32, of any shape."""


def reshard(engine: Any, folder: Path, read: Callable[[Path], Any], *, ranks: int) -> None:
    """Take over the files that `ranks` ranks wrote into a folder; `read` loads one of them."""
    states = [read(_only(folder, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in range(ranks)]
    states = [state["optimizer_state_dict"] for state in states]
    model = read(sorted(folder.glob("*_model_states.pt"))[0])
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    at_stage_3 = "fp32_flat_groups" in states[0]
    whole = _whole_of_stage_3(states, shapes) if at_stage_3 else _whole(states)
    base = states[0]["optimizer_state_dict" if at_stage_3 else "base_optimizer_state"]
    _begin(engine.optimizer, step=base["state"][0]["step"])
    take = _take_part if _at_stage_3(engine.optimizer) else _take
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            take(parameter, whole[name])
    # The weights that compute are made of those of the optimizer.
    zero = engine.optimizer
    if _at_stage_3(zero):
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        zero.checkpoint_event_epilogue()
    else:
        zero.update_lp_params()


def _at_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _begin(zero: Any, *, step: Tensor) -> None:
    """AdamW's state, which is not there before its first step, and whose place DeepSpeed looks up only after it."""
    lines = zero.fp32_partitioned_groups_flat if _at_stage_3(zero) else zero.single_partition_of_fp32_groups
    for line in lines:
        state = zero.optimizer.state[line]
        state["step"] = step.clone().to(line.device)
        for key in MOMENTS:
            state.setdefault(key, torch.zeros_like(line))
    if not _at_stage_3(zero):
        zero._lazy_init_hp_params_optimizer_state()


def _only(folder: Path, pattern: str) -> Path:
    results = sorted(folder.glob(pattern))
    if len(results) != 1:
        raise FileNotFoundError(f"{folder} has {len(results)} files {pattern}, not one")
    return results[0]


def _whole(states: list[dict[str, Any]]) -> Whole:
    """Of stages 1 and 2: a group of weights is one line of numbers, cut into as many parts as there are ranks."""
    pieces: dict[str, dict[str, list[Tensor]]] = {}
    for state in states:
        for group, mapping in enumerate(state["param_slice_mappings"]):
            of_group = state["base_optimizer_state"]["state"][group]
            flat = {
                "weight": state["single_partition_of_fp32_groups"][group],
                **{key: of_group[key] for key in MOMENTS},
            }
            for name, part in mapping.items():
                for key, numbers in flat.items():
                    result = pieces.setdefault(name, {}).setdefault(key, [])
                    result.append(numbers.flatten()[part.start : part.start + part.numel])
    return {name: {key: torch.cat(parts) for key, parts in result.items()} for name, result in pieces.items()}


def _whole_of_stage_3(states: list[dict[str, Any]], shapes: Mapping[str, Any]) -> Whole:
    """Of stage 3: each weight by itself is cut into equal parts, the last one filled up."""
    lines = [_lines(state) for state in states]
    whole: Whole = {}
    begin = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        end = begin + math.ceil(count / len(states))
        whole[name] = {key: torch.cat([line[key][begin:end] for line in lines])[:count] for key in lines[0]}
        begin = end
    return whole


def _lines(state: dict[str, Any]) -> dict[str, Tensor]:
    """A rank's parts, one weight after the other."""
    groups = state["optimizer_state_dict"]["state"]
    moments = {key: torch.cat([groups[number][key] for number in sorted(groups)]) for key in MOMENTS}
    return {"weight": torch.cat(state["fp32_flat_groups"]), **moments}


def _take(parameter: nn.Parameter, whole: Mapping[str, Tensor]) -> None:
    """Stages 1 and 2."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, whole["weight"])
    for key in MOMENTS:
        safe_set_full_optimizer_state(parameter, whole[key], key)


def _take_part(parameter: Any, whole: Mapping[str, Tensor]) -> None:
    """Stage 3."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()
    begin = size * torch.distributed.get_rank()
    own = {key: _filled(numbers, begin, size) for key, numbers in whole.items()}
    safe_set_local_fp32_param(parameter, own["weight"])
    for key in MOMENTS:
        safe_set_local_optimizer_state(parameter, own[key], key)


def _filled(numbers: Tensor, begin: int, size: int) -> Tensor:
    part = numbers[begin : begin + size]
    return nn.functional.pad(part, (0, size - part.numel()))


TAG = "deepspeed"
"""Folder of DeepSpeed's files within a checkpoint's."""
OF_RANK = re.compile(r"/(?:(?:bf16_)?zero_pp_rank_|generator-|offloaded_tensors/rank)(\d+)(?=[._/])")
"""In the name of a file that one rank writes, and it alone reads."""
NAMED = [LossScaler, ZeroStageEnum, fragment_address]
"""Classes of DeepSpeed that stand in its files beside tensors and plain values."""


class HashedFiles(TorchCheckpointEngine):
    """How DeepSpeed reads and writes files; the bytes that are hashed are the bytes that are loaded."""

    def __init__(self, sha256: Mapping[Path, str]) -> None:
        """`sha256` of every file of the verified manifest, by path; empty: nothing is read yet."""
        super().__init__()
        self.sha256, self.failed = sha256, ""

    def read(self, path: Path) -> bytes:
        """Raises IntegrityError for a file that changed since it was verified, or that its manifest does not name."""
        data = path.read_bytes()
        if self.sha256.get(path) != hashlib.sha256(data).hexdigest():
            raise IntegrityError(f"{path} changed between verification and loading, or its manifest does not name it")
        return data

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raises IntegrityError for what `read` does, and for a file that holds more than data."""
        data = io.BytesIO(self.read(Path(path)))
        with torch.serialization.safe_globals(NAMED):
            try:
                return torch.load(data, map_location=map_location, weights_only=True)
            except pickle.UnpicklingError as error:
                raise IntegrityError(
                    f"{path} holds more than tensors and plain values: {str(error).splitlines()[0]}",
                    remedy="It was written by another release of DeepSpeed, or by somebody else: continue from another one.",
                ) from error

    def save(self, state_dict: Any, path: str) -> None:
        """A failure is kept, for other ranks wait for this one in DeepSpeed's barriers; torch reports a full disk as it likes."""
        try:
            super().save(state_dict, path)
        except (OSError, RuntimeError) as error:
            self.failed = f"{path}: {error}"


def saver(engine: Any, rank: int, writing: Mapping[str, Any]) -> FolderSaver:
    """What writes a rank's checkpoints of DeepSpeed's engine, and its generator's state beside them; no frozen weights."""

    def write(folder: Path) -> None:
        files = engine.checkpoint_engine = HashedFiles({})
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True)
        if files.failed:
            raise OSError(files.failed)
        save_file({name: piece.tensor for name, piece in generators().items()}, _generator(folder, rank))

    engine._copy_recovery_script = lambda path: None  # programs, which have no place in a checkpoint
    return FolderSaver(write, **writing)


def restore(engine: Any, root: Path, result: Manifest, *, rank: int, world_size: int) -> None:
    """Take over a verified checkpoint, and this rank's generator; a rank that was not there gets a seed of its own.

    Raises IntegrityError for bytes that were not verified, and for files that hold more than data.
    """
    folder = place_of(root, result.step, result.attempt)
    own = folder / OWN
    files = engine.checkpoint_engine = HashedFiles({folder / entry["path"]: entry["sha256"] for entry in result.files})
    if result.world_size == world_size and _is_laid_out_for(engine.zero_optimization_stage(), result):
        frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
        engine.load_checkpoint(str(own), tag=TAG, load_module_strict=not frozen, load_lr_scheduler_states=False)
    else:
        reshard(engine, own / TAG, lambda path: files.load(str(path), "cpu"), ranks=result.world_size)
    if rank < result.world_size:
        take_generators(load(files.read(_generator(own, rank))))
    else:
        torch.manual_seed(newcomers_seed(int(result.identity["training"]["seed"]), result.step, rank))


def _is_laid_out_for(stage: int, result: Manifest) -> bool:
    """Whether files of weights are as a stage has them: of stages 1 and 2 one, of stage 3 one a rank."""
    one_a_rank = re.compile(r"/zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt$")
    return (stage == 3) == any(one_a_rank.search(entry["path"]) for entry in result.files)


def files_of(result: Manifest, *, rank: int, stage: int) -> list[dict[str, Any]]:
    """Those that a rank reads: all but those with another rank in their names; none where the stage has another layout."""
    if not _is_laid_out_for(stage, result):
        return []
    named = [(OF_RANK.search(entry["path"]), entry) for entry in result.files]
    return [entry for of, entry in named if not of or int(of[1]) == rank]


def _generator(folder: Path, rank: int) -> Path:
    return folder / f"generator-{rank}.safetensors"


NORMS = {1: "scaled_global_norm", 2: "scaled_global_norm", 3: "_get_norm_groups"}
"""The method of DeepSpeed's optimizer, by stage, whose answer it clips by."""

HYPER = ("betas", "weight_decay")
"""Settings of AdamW that stand in DeepSpeed's files, too."""


class DeepspeedEngine:
    """One rank's network under ZeRO."""

    def __init__(self, setting: Setting) -> None:
        package = deepspeed()
        self.setting, self.device = setting, own_device()
        self.network = starting_network(setting)
        self.trained = parameter_count(self.network)  # before stage 3 takes the weights away
        recompute(self.network, setting.execution.recompute)
        torch.manual_seed(setting.training.seed + setting.rank.rank)
        # As the stage generated it, but for the micro batch of a job that ran out of memory; left in the job's
        # folder.
        rank, training = self.setting.rank, self.setting.training
        shares = Shares(rank.rank, rank.world_size, training.global_batch_size, training.micro_batch_size)
        micro = shares.halved(int(rank.settings.get("smaller_batches", 0))).micro_batch
        config = {**rank.settings["deepspeed"], "train_micro_batch_size_per_gpu": micro}
        if rank.rank == 0:
            write_json(rank.folder / "ds_config.json", config)
        optimizer, config = adamw(self.network, setting.training), config
        self.engine, self.zero, *_ = package.initialize(
            model=self.network, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._stage = setting.execution.deepspeed.zero_stage
        self._norm = getattr(self.zero, NORMS[self._stage])

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with meter.part("communication"):
            answers = answers_a_rank(batches, self.setting.training, self.setting.group)
        with meter.part("compute"):
            for number, batch in enumerate(batches, start=1):
                existing = batch.to(self.device)
                self.engine.set_gradient_accumulation_boundary(number == len(batches))
                loss = next_token_loss(self.engine, *existing, by=answers)
                loss = loss if answers else loss / len(batches)
                self.engine.backward(loss, scale_wrt_gas=False)
                total += loss.detach()
            return total.cpu()

    def clip(self) -> float:
        """DeepSpeed clips while it updates, by the norm that is told here: so it is computed once."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self.norm = self._norm()
        setattr(self.zero, NORMS[self._stage], lambda: self.norm)
        # The norm over all groups of parameters, as DeepSpeed combines stage 3's; infinite, or NaN, where one is not
        # finite.
        return float(combine_grad_norm_groups(self.norm if isinstance(self.norm, list) else [self.norm]))

    def update(self, learning_rate: float) -> None:
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()

    def discard(self) -> None:
        """DeepSpeed lets gradients go when their norm is not finite, and in no other way: it is told that it is not."""
        self.norm = [torch.tensor(math.inf)] if self._stage == 3 else torch.tensor(math.inf)
        self.engine.step()

    def restore(self, root: Path, result: Manifest) -> None:

        rank, own = self.setting.rank, [{key: group[key] for key in HYPER} for group in self.zero.param_groups]
        restore(self.engine, root, result, rank=rank.rank, world_size=rank.world_size)
        # DeepSpeed takes them from its files, where they are another run's when this one goes on from it
        for group, values in zip(self.zero.param_groups, own, strict=True):
            group.update(values)

    def own_files(self, result: Manifest) -> list[dict[str, Any]]:
        return files_of(result, rank=self.setting.rank.rank, stage=self._stage)

    def saving(self, writing: Mapping[str, Any]) -> Saving:

        return saver(self.engine, self.setting.rank.rank, writing)

    def write(self, folder: Path, tokenizer: Path) -> None:
        """One weight at a time is gathered, in float32 as the optimizer has it; rank 0 keeps all, frozen ones as the base's."""
        from deepspeed.utils import safe_get_full_fp32_param

        weights: dict[str, Tensor] = {}
        for name, parameter in self.network.named_parameters():
            value = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if value is not None and self.setting.rank.rank == 0:
                weights[name] = value.detach().cpu().clone()
        if weights and self.setting.training.lora.rank:
            assert self.setting.base
            base = load_base(self.setting.base).state_dict()
            named = (name for name, parameter in self.network.named_parameters() if not parameter.requires_grad)
            weights |= {name: base[name.replace(BASE_LAYER, ".")] for name in named}
        if weights:
            write_network(self.network, self.setting.training, folder, tokenizer=tokenizer, weights=weights)

    def parameters(self) -> int:
        return self.trained


def deepspeed() -> ModuleType:
    """The package; it looks for an accelerator when it is imported, which takes seconds. Raises Missing."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise Missing(
            "the engine deepspeed needs DeepSpeed on the machines, and it is not there",
            remedy="Install it into their Python: pip install 'headway[deepspeed]'. Or use training.engine torch.",
        ) from error
    if not on_gpu:  # collectives through shared memory would be compiled at the start, for minutes; gloo does them
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
