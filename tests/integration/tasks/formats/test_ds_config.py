"""What DeepSpeed is told, from our settings: golden, and what is refused."""

import pytest
from pydantic import ValidationError

from tasks.config.engines.deepspeed import ds_config
from tasks.config.engines.registry import ENGINES
from tasks.config.training import DeepspeedConfig, ExecutionConfig, LoraConfig, TrainingConfig

TRAINING = TrainingConfig(engine="deepspeed", global_batch_size=32, micro_batch_size=2, gradient_clip=0.5)


def generated(training=TRAINING, **zero):
    return ds_config(training, ExecutionConfig(deepspeed=DeepspeedConfig(**zero)))


def test_it_is_whole_and_names_no_machine():
    assert generated() == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True},
        "zero_force_ds_cpu_optimizer": False,
    }


def test_bf16_is_of_the_weights_that_compute():
    assert generated(TRAINING.model_copy(update={"precision": "bf16"}))["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"zero_stage": 1}, {}),
        ({"offload": "cpu"}, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
        (
            {"zero_stage": 3, "offload": "nvme", "nvme_path": "/mnt/nvme"},
            {
                name: {"device": "nvme", "pin_memory": True, "nvme_path": "/mnt/nvme"}
                for name in ("offload_optimizer", "offload_param")
            },
        ),
    ],
)
def test_what_lies_elsewhere(zero, expected):
    found = generated(**zero)["zero_optimization"]
    assert found == {"stage": zero.get("zero_stage", 2), "contiguous_gradients": True, "overlap_comm": True, **expected}


@pytest.mark.parametrize("zero", [{"offload": "nvme"}, {"offload": "nvme", "nvme_path": "/mnt/nvme"}])
def test_nvme_needs_a_folder_and_stage_3(zero):
    with pytest.raises(ValidationError, match=r"needs deepspeed\.(nvme_path|zero_stage 3, not 2)"):
        ExecutionConfig(deepspeed=DeepspeedConfig(**zero))


def test_adapters_are_refused_where_frozen_weights_are_divided():
    adapters = TRAINING.model_copy(update={"base": "checkpoint/base", "lora": LoraConfig(rank=4)})
    ENGINES["deepspeed"].require_fits(adapters, ExecutionConfig())
    with pytest.raises(ValueError, match=r"training\.lora\.rank 4 under .*zero_stage 3.*set zero_stage to 2"):
        ENGINES["deepspeed"].require_fits(adapters, ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=3)))


@pytest.mark.parametrize(
    ("training", "execution", "named"),
    [
        ({}, {"tensor_parallel": 2}, "execution.tensor_parallel 2"),
        ({}, {"parallel": "fsdp"}, "execution.parallel fsdp"),
        ({}, {"compile": True}, "execution.compile True"),
        ({}, {"local_every_steps": 5}, "execution.local_every_steps 5"),
    ],
)
def test_what_zero_does_not_do_here_is_refused(training, execution, named):
    with pytest.raises(ValueError, match=f"the engine deepspeed has no {named}"):
        ENGINES[TRAINING.engine].require_fits(TRAINING.model_copy(update=training), ExecutionConfig(**execution))
