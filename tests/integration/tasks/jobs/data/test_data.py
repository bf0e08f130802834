"""The order of samples, and how a batch is divided."""

import json

import numpy as np
import pytest
import torch

from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter
from tasks.jobs.data.samples import Mapped, Samples, Shares, open_samples, tokens_identity, vocabulary
from tasks.jobs.data.sources import open_source
from tasks.jobs.train_megatron import data_path

LENGTH = 4


@pytest.fixture
def samples():
    return Samples(Mapped(np.arange(10 * LENGTH + 3, dtype=np.uint16)), length=LENGTH, seed=7)


def parts_of(samples, consumed, *, world_size, global_batch=8, micro_batch=2):
    """All micro batches of all ranks, in the order of the ranks: inputs and targets side by side."""
    found = []
    for rank in range(world_size):
        shares = Shares(rank, world_size, global_batch, micro_batch)
        for inputs, targets, _ in shares.micro_batches(samples, consumed):
            assert inputs.shape == targets.shape == (micro_batch, LENGTH)
            found.append(np.concatenate([inputs, targets], axis=1))
    return np.concatenate(found)


@pytest.mark.parametrize("consumed", [0, 8, 5, 96])
def test_the_order_is_that_of_any_other_world_size(samples, consumed):
    alone = parts_of(samples, consumed, world_size=1)
    for world_size in (2, 4):
        assert np.array_equal(alone, parts_of(samples, consumed, world_size=world_size))


def test_the_size_of_a_step_does_not_change_the_order(samples):
    in_one = samples.batch(3, 12)
    in_three = np.concatenate([samples.batch(3 + done, 4) for done in (0, 4, 8)])
    assert np.array_equal(in_one, in_three)


def test_every_epoch_visits_every_sample_once_and_predicts_every_token_once(samples):
    epochs = [samples.batch(epoch * samples.count, samples.count) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch[:, 0]) == [LENGTH * index for index in range(10)]
        assert sorted(epoch[:, 1:].flatten()) == list(range(1, 10 * LENGTH + 1))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0][:, 0], sorted(epochs[0][:, 0]))


def test_the_order_is_the_one_that_the_first_release_had(samples):
    """Resuming and repeating a run both break when this changes."""
    assert (samples.batch(0, 10)[:, 0] // LENGTH).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


def test_another_seed_is_another_order(samples):
    other = Samples(samples.tokens, length=LENGTH, seed=8)
    assert not np.array_equal(samples.batch(0, 10), other.batch(0, 10))


def test_targets_are_the_inputs_one_token_later(samples):
    [(inputs, targets, _)] = Shares(0, 1, 2, 2).micro_batches(samples, 0)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"global_batch_size 12 .* multiple of 4 x 2 = 8"):
        Shares(0, 2, 12, 4)


def write_tokens(folder, documents):
    writer = TokenWriter(folder / "train_text_document", 300)
    for document in documents:
        writer.add_document(document)
    writer.close()
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 300, "eod_id": 299}))


def test_a_split_shorter_than_a_sample_is_refused(tmp_path):
    write_tokens(tmp_path, [[1] * 15, [2]])
    with pytest.raises(
        ValueError, match=r"has 16 tokens, .* sequence_length \+ 1 = 17.*lower training.sequence_length"
    ):
        open_samples(tmp_path, TrainingConfig(sequence_length=16))
    assert open_samples(tmp_path, TrainingConfig(sequence_length=15)).batch(0, 1).tolist() == [[1] * 15 + [2]]


def test_the_identity_of_tokens_changes_with_their_description_and_size(tmp_path):
    write_tokens(tmp_path, [[1] * 20])
    before = tokens_identity(tmp_path)
    assert tokens_identity(tmp_path) == before
    assert vocabulary(tmp_path) == (300, 299)
    write_tokens(tmp_path, [[1] * 21])
    longer = tokens_identity(tmp_path)
    assert longer != before and longer["tokens.json"] == before["tokens.json"]
    (tmp_path / "tokens.json").write_text(json.dumps({"vocab_size": 301, "eod_id": 299}))
    assert tokens_identity(tmp_path)["tokens.json"] != before["tokens.json"]


@pytest.mark.parametrize(
    ("share", "micro", "times", "left"),
    [(8, 4, 0, 4), (8, 4, 1, 2), (8, 4, 9, 1), (6, 6, 1, 3), (12, 6, 2, 1), (5, 5, 1, 1)],
)
def test_a_micro_batch_is_halved_until_it_divides(share, micro, times, left):
    assert Shares(0, 2, 2 * share, micro).halved(times).micro_batch == left


def test_halved_batches_hold_the_same_samples(samples):
    inputs = [
        torch.cat([batch.inputs for batch in Shares(1, 2, 8, 4).halved(times).micro_batches(samples, 0)])
        for times in (0, 1, 2)
    ]
    assert all(torch.equal(inputs[0], other) for other in inputs[1:])


def written(folder, *sizes):
    """A tokens folder whose training split is one file for each size; its tokens count from 0 through all of them."""
    folder.mkdir()
    names = ["train_text_document"] if len(sizes) == 1 else [f"train-{n:05d}_text_document" for n in range(len(sizes))]
    first = 0
    for name, size in zip(names, sizes, strict=True):
        writer = TokenWriter(folder / name, 1000)
        writer.add_document(list(range(first, first + size)))
        writer.close()
        first += size
    files = {"files": {"train": names}} if len(names) > 1 else {}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 1000, "eod_id": 0, "splits": {"train": {}}, **files}))
    return folder


@pytest.mark.parametrize("sizes", [(50, 151), (3, 2, 1, 195), (67, 67, 67), (200, 1)])
@pytest.mark.parametrize("cache", [None, 1.0])
def test_a_split_of_many_files_gives_the_samples_of_one(tmp_path, monkeypatch, sizes, cache):
    """Also those that reach from one file into the next, or over three."""
    monkeypatch.setenv("HEADWAY_SCRATCH", str(tmp_path))
    config, how = TrainingConfig(sequence_length=LENGTH), ExecutionConfig(cache_gib=cache)
    one, many = (
        open_source({"tokens": written(tmp_path / name, *shape)}, config, how)
        for name, shape in (("one", (sum(sizes),)), ("many", sizes))
    )
    assert one.count == many.count == (sum(sizes) - 1) // LENGTH
    assert np.array_equal(one.batch(3, 2 * one.count), many.batch(3, 2 * one.count))
    for source in (one, many):
        source.close(done=True)


def test_a_checkpoint_remembers_every_file_and_megatron_draws_from_each_by_its_tokens(tmp_path):
    folder = written(tmp_path / "many", 50, 150)
    names = [f"train-{number:05d}_text_document" for number in (0, 1)]
    assert {*tokens_identity(folder)["bytes"]} == {f"{name}.{ending}" for name in names for ending in ("bin", "idx")}
    words = ("0.25", str(folder / names[0]), "0.75", str(folder / names[1]))
    assert data_path({"tokens": folder}, TrainingConfig()) == words
    other = written(tmp_path / "other", 10)
    mixed = TrainingConfig(mixture={"tokens/a@" + "0" * 64: 3.0, "tokens/b@" + "1" * 64: 1.0})
    assert data_path({"tokens": folder, "tokens-b": other}, mixed) == (
        *("0.1875", words[1], "0.5625", words[3]),
        *("0.25", str(other / "train_text_document")),
    )
