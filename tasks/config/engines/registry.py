"""Which engines there are, by `training.engine`."""

from __future__ import annotations

from tasks.config.engines import Engine
from tasks.config.engines.deepspeed import DeepspeedEngine
from tasks.config.engines.megatron import MegatronEngine
from tasks.config.engines.torch import TorchEngine
from tasks.config.training import EngineName

ENGINES: dict[EngineName, Engine] = {
    "torch": TorchEngine(),
    "deepspeed": DeepspeedEngine(),
    "megatron": MegatronEngine(),
}
