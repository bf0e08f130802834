"""The training probe: a real training of a small network, alone in this process and on two machines that are this one."""

import math
import re

import pytest
import torch
from bench_stand import TRAINING, bench, launch, measured, settings
from torch.utils.flop_counter import FlopCounterMode

from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.hardware.sku import load_sku
from tasks.jobs.qualify import training
from tasks.jobs.qualify.bench import VOCABULARY, flops_per_token, vocabulary
from tasks.qualification.judge import judge

CONFIG = TrainingConfig.model_validate(TRAINING)


def loss_of(point):
    return float(re.search(r"loss (\S+)", point.said)[1])


def test_one_machine_trains_and_says_what_its_steps_went_to(tmp_path):
    training.measure(bench(tmp_path, probe_steps=3))
    (point,) = measured(tmp_path).training
    assert (point.status, point.ranks, point.convention, point.engine) == ("measured", 1, "megatron", "torch")
    shares = (point.data_share, point.communication_share, point.compute_share)
    assert sum(shares) == pytest.approx(1) and all(0 <= share < 1 for share in shares)
    assert point.tokens_per_step == 8 * 32
    assert math.isfinite(loss_of(point)) and abs(loss_of(point) - math.log(320)) < 1  # random tokens: nothing to learn
    assert point.tflops_per_rank == pytest.approx(flops_per_token(bench(tmp_path)) * 256 / point.step_seconds / 1e12)


def test_the_convention_is_near_what_torch_counts(tmp_path):
    """Torch counts attention's whole square, Megatron half of it; norms and the rest neither counts."""
    from tasks.jobs.training.network import build_network, next_token_loss

    network = build_network(CONFIG, vocab_size=320, eod=0)
    tokens = torch.randint(0, 320, (2, 32))
    with FlopCounterMode(display=False) as counter:
        next_token_loss(network, tokens, tokens).backward()
    ours = flops_per_token(bench(tmp_path)) * 64
    assert 0.9 * counter.get_total_flops() < ours < 1.1 * counter.get_total_flops()


def test_two_machines_train_alone_and_together(tmp_path):
    found = launch(tmp_path, settings("training", probe_steps=4), nodes=2)
    points = sorted(found.training, key=lambda point: (point.ranks, point.nodes))
    assert [point.nodes for point in points] == [("node-0",), ("node-1",), ("node-0", "node-1")]
    assert [point.tokens_per_step for point in points] == [4 * 32, 4 * 32, 8 * 32]  # weak scaling
    assert all(point.status == "measured" and math.isfinite(loss_of(point)) for point in points)
    assert points[2].communication_share > 0
    judged = judge(found, load_sku("local-cpu"), BenchmarkConfig(checks=("training",)))
    assert not [reason.sentence for reason in judged.reasons]


def test_a_probe_whose_time_is_over_is_no_rate(tmp_path):
    training.measure(bench(tmp_path, check_seconds=1e-9))
    (point,) = measured(tmp_path).training
    assert point.status == "timed out" and point.tflops_per_rank is None


def test_steps_that_take_too_long_are_told(tmp_path):
    """The time is over during the first step: none of those that count was done."""
    from tasks.jobs.qualify.training import train

    with pytest.raises(RuntimeError, match="none was timed"):
        train(bench(tmp_path), [0], seconds=1e-3)
    assert not torch.distributed.is_initialized()


def test_a_loss_that_is_no_number_is_a_failure(tmp_path):
    broken = {**TRAINING, "learning_rate": 1e38, "warmup_steps": 0}
    training.measure(bench(tmp_path, training=broken))
    (point,) = measured(tmp_path).training
    assert point.status == "failed" and "loss" in point.said


def test_sizes_of_the_curve():
    assert [training.scales(nodes) for nodes in (1, 2, 3, 4, 6, 64)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64],
    ]  # fmt: skip


def test_batches_divide_on_every_number_of_ranks():
    from tasks.jobs.qualify.training import shares

    for ranks in range(1, 9):
        for of_all in range(ranks, 9):
            made = shares(CONFIG, 0, ranks=ranks, all_ranks=of_all)
            assert made.samples == shares(CONFIG, 0, ranks=1, all_ranks=of_all).samples >= CONFIG.micro_batch_size
            assert made.samples <= max(CONFIG.global_batch_size // of_all, CONFIG.micro_batch_size)


def test_a_vocabulary_that_nobody_says(tmp_path):
    said = bench(tmp_path)
    assert vocabulary(said) == 320
    del said.rank.settings["vocab_size"]
    assert vocabulary(said) == VOCABULARY
