"""A checkpoint of DeepSpeed taken over by another number of ranks, or under another ZeRO stage.

DeepSpeed itself refuses that. Every rank reads all files, puts each weight and its moments together, and takes its own part of
them: memory for the whole state on the host of each rank, once, at the start. How each file is read is deepspeed_files.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
        take(parameter, whole[name])
    _refresh(engine.optimizer)


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
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} has {len(found)} files {pattern}, not one")
    return found[0]


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
                    found = pieces.setdefault(name, {}).setdefault(key, [])
                    found.append(numbers.flatten()[part.start : part.start + part.numel])
    return {name: {key: torch.cat(parts) for key, parts in found.items()} for name, found in pieces.items()}


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


def _refresh(zero: Any) -> None:
    """The weights that compute, from those of the optimizer."""
    if not _at_stage_3(zero):
        zero.update_lp_params()
        return
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    zero.checkpoint_event_epilogue()
