"""One network on many ranks: the device of a rank, whole weights (DDP), divided ones (FSDP2), shared matrices (tensor parallel).

Ranks that share matrices are neighbours and see the same samples: rank = data rank x tensor_parallel + place among them.
What is computed is torch_engine.py; how divided tensors are saved is tasks/jobs/checkpoint/pieces.py and
tasks/jobs/checkpoint/snapshot.py.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.config.training import ExecutionConfig, TrainingConfig

BACKENDS = "cpu:gloo,cuda:nccl"
"""Of a process group with GPUs: gradients go over nccl, what ranks agree on lies on the CPU and goes over gloo."""
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Matrices of a Llama block whose outputs are divided: whole heads, and whole columns of the feed-forward layer."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Those that take divided inputs; their outputs are summed over the ranks."""
PLANNED = ("LlamaForCausalLM",)
KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "bmm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Operations whose results selective recomputation keeps: those that are dear to compute again."""


def own_gpu(local_rank: int, *, setting: str = "cluster.ranks_per_node") -> str:
    """Take this rank's GPU, if the machine has GPUs; returns the backends of its process group.

    A rank that sees one GPU was given it. Raises ValueError when the machine has fewer GPUs than ranks, as `setting` says.
    """
    count = torch.cuda.device_count()
    if not count:
        return "gloo"
    if 1 < count <= local_rank:
        raise ValueError(f"rank {local_rank} of this machine has no GPU: there are {count}. Lower {setting} to {count}")
    torch.cuda.set_device(0 if count == 1 else local_rank)
    return BACKENDS


def own_device() -> torch.device:
    """Where this rank computes: the GPU that it took, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def repeatable(*, always: bool) -> None:
    """Have torch give the same bits for the same step: on CPUs always, on GPUs where asked, for it costs speed there."""
    exact = always or not torch.cuda.is_available()
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False


def data_place(rank: int, world_size: int, execution: ExecutionConfig) -> tuple[int, int]:
    """Which share of the samples is a rank's, and how many shares there are.

    Raises ValueError when ranks do not divide into groups of `tensor_parallel`.
    """
    if world_size % execution.tensor_parallel:
        raise ValueError(
            f"{world_size} ranks do not divide into groups of execution.tensor_parallel {execution.tensor_parallel}"
        )
    return rank // execution.tensor_parallel, world_size // execution.tensor_parallel


def selective() -> Any:
    """Contexts of torch's activation checkpointing that keep what is in KEPT and compute the rest again."""

    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(network: nn.Module, what: str) -> None:
    """Have the network compute activations again in the backward pass: `none`, `selective` or `full`."""
    if what != "none":
        more = {"context_fn": selective} if what == "selective" else {}
        cast(Any, network).activation_checkpointing_enable({"use_reentrant": False, **more})


class Parallel:
    """The network as all ranks train it: called as the network is, its gradients are averaged in the backward pass."""

    def __init__(
        self,
        network: nn.Module,
        training: TrainingConfig,
        execution: ExecutionConfig,
        *,
        device: torch.device,
        group: Any,
    ) -> None:
        """Divides the network in place: its optimizer is built afterwards. `group`: of the ranks, None for the default one."""
        self.network, self.device, self.divided = network, device, execution.parallel == "fsdp"
        self.half = training.precision == "bf16"
        self.ready: Callable[[], None] = lambda: None
        """Called when the last gradients of a step are ready to be averaged; by DDP only."""
        recompute(network, execution.recompute)
        mesh = _mesh(execution, device, group) if self.divided else None
        if execution.tensor_parallel > 1:
            assert mesh is not None
            _share_matrices(network, mesh["tensor"])
        if execution.compile:
            for block in blocks(network):
                block.compile()
        if mesh is not None:
            # FSDP2: every block is a unit that is gathered while it computes; the rest, embeddings too, is one more.
            halved = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            policy = halved if self.half else MixedPrecisionPolicy()
            data = mesh["data"]
            for part in (*blocks(self.network), self.network):
                fully_shard(part, mesh=data, mp_policy=policy)
        network.to(device)
        self.called = network if self.divided or dist.get_world_size() == 1 else self._replicate(group)

    def _replicate(self, group: Any) -> DistributedDataParallel:
        devices = [self.device.index] if self.device.type == "cuda" else None
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "device_ids": devices}
        parallel = DistributedDataParallel(self.network, process_group=group, **options)
        # DDP reads the hook's annotations, which are text in this module; a lambda has none
        parallel.register_comm_hook(group, lambda group, bucket: self._average(group, bucket))
        return parallel

    def _average(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's own averaging; once the last gradients are ready, what is left of the backward pass is communication."""
        if bucket.is_last():
            self.ready()
        return allreduce_hook(group, bucket)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients are accumulated, and averaged over ranks with the last one."""
        if self.divided:
            cast(FSDPModule, self.network).set_requires_gradient_sync(last)
        alone = not last and isinstance(self.called, DistributedDataParallel)
        with self.called.no_sync() if alone else nullcontext():
            yield

    def lower(self) -> torch.autocast:
        """Around forward: matrix products in bf16, where FSDP2 does not hold the weights in it anyway."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half and not self.divided)

    def clip(self, most: float) -> float:
        """Clip the gradients' norm; returns what it was."""
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        if self.divided:
            return clip_divided([cast(Tensor, parameter.grad) for parameter in parameters], most)
        return float(nn.utils.clip_grad_norm_(parameters, most))

    def whole(self) -> dict[str, Tensor]:
        """All weights by name, on the CPU, tied ones once; a collective of all ranks, empty on all but rank 0."""
        result = {}
        for name, value in self.network.named_parameters():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                result[name] = full.detach().cpu()
        return result


def blocks(network: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in order."""
    return [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]


def _mesh(execution: ExecutionConfig, device: torch.device, group: Any) -> DeviceMesh:
    """Ranks by `data` and `tensor`. Without shared matrices it is the group of the step's collectives, with its patience."""
    shared = execution.tensor_parallel
    if shared == 1 and group is not None:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
    shape = (dist.get_world_size(),) if shared == 1 else (dist.get_world_size() // shared, shared)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor")[: len(shape)])


def _share_matrices(network: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel as in Megatron-LM (Shoeybi et al. 2019, section 3): two sums a block forward, two backward."""
    if type(network).__name__ not in PLANNED:
        raise ValueError(
            f"execution.tensor_parallel has no plan for {type(network).__name__}, only for {', '.join(PLANNED)}: use 1"
        )
    shape = cast(Any, network).config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(shape, name)) % mesh.size():
            raise ValueError(f"{name} {count} does not divide by execution.tensor_parallel {mesh.size()}")
    plan = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
    for block in blocks(network):
        parallelize_module(block, mesh, plan)


def clip_divided(gradients: Iterable[Tensor], most: float) -> float:
    """Clip the L2 norm over all ranks' parts of gradients, as torch's clip_grad_norm_ does; returns what it was.

    A part that ranks share is counted once; gradients may lie on different meshes.
    """
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        parts[gradient.device_mesh, gradient.placements].append(gradient.to_local())
    squares = []
    for (mesh, placements), local in parts.items():
        square = torch.stack(torch._foreach_norm(local)).double().square().sum()
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    norm = float(torch.stack(squares).sum().sqrt())
    scale = min(1.0, most / (norm + 1e-6)) if norm == norm else norm
    for local in parts.values():
        torch._foreach_mul_(local, scale)
    return norm
