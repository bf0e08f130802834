"""Megatron-LM as far as a CPU takes it, as a program: megatron_on_cpu.py CHECKOUT VOCABULARY ARGUMENT...

Its own parser, validation, transformer configuration and model builder take the arguments of a job; then one forward and backward
pass of that model. What stands in for a GPU is named here and nowhere else: the compute capability that the validation asks for,
the device that tensors are put on, the random state of the GPU, Triton's kernels (defined at import, never called), and
`typing.override` of Python 3.12. Kernels, NCCL, Transformer Engine, mixed precision and the training loop are not reached.
"""

import contextlib
import json
import os
import sys
import types
import typing

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.standalone_compile  # looks for Triton by itself, before there is one
import typing_extensions


class Absent(types.ModuleType):
    """Triton, which a CPU build of torch lacks."""

    __path__: typing.ClassVar = []
    __version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) else (lambda kernel: kernel)


checkout, vocabulary, *arguments = sys.argv[1:]
sys.modules |= {name: Absent(name) for name in ("triton", "triton.language")}
sys.path.insert(0, checkout)
sys.argv = ["pretrain_gpt.py", *arguments]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
typing.override = getattr(typing, "override", typing_extensions.override)
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.current_device = lambda: torch.device("cpu")

from gpt_builders import gpt_builder  # noqa: E402
from megatron.core import mpu, tensor_parallel  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args  # noqa: E402

args = parse_args()
args = validate_args(args) or args
config = core_transformer_config_from_args(args)
config.use_cpu_initialization = args.use_cpu_initialization = True
args.padded_vocab_size = int(vocabulary)

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mpu.initialize_model_parallel()
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
model = gpt_builder(args, pre_process=True, post_process=True, config=config)

tokens = torch.randint(0, int(vocabulary), (2, args.seq_length + 1))
positions = torch.arange(args.seq_length).repeat(2, 1)
mask = torch.ones(1, 1, args.seq_length, args.seq_length).tril() < 0.5
loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
loss.backward()
print(
    json.dumps(
        {
            "implementation": args.transformer_impl,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss": float(loss),
            "gradients": all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()),
        }
    )
)
