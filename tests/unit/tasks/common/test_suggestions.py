"""A key that there is not: which one it probably stands for, wherever that lies."""

import pytest

from tasks.config.files import changed
from tasks.config.flows import RetrainConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("training.lr", "training.learning_rate"),
        ("optimizer.lr", "training.learning_rate"),
        ("lr", "training.learning_rate"),
        ("training.batch_size", "training.global_batch_size"),
        ("training.epochs", "training.steps"),
        ("seq_len", "training.sequence_length"),
        ("training.layers", "training.network.layers"),
        ("learning_rat", "training.learning_rate"),
        ("training.stps", "training.steps"),
        ("deployment.prot", "deployment.port"),
        ("cluster.gpus", "cluster.gpus_per_node"),
    ],
)
def test_a_wrong_key_is_answered_with_the_right_one(wrong, right):
    with pytest.raises(ValueError, match=rf"{wrong.partition('.')[0]}.*did you mean {right}\?"):
        changed(RetrainConfig, [f"{wrong}=3"])


def test_what_resembles_nothing_is_answered_with_the_keys_of_its_section():
    with pytest.raises(ValueError, match=r"planning\.checkpoint\.zzz: .*there are: every_steps, keep"):
        changed(RetrainConfig, ["planning.checkpoint.zzz=3"])
