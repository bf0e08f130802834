"""Reading ahead, mixtures, and documents that do not see each other."""

import json
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter
from tasks.jobs.data import samples
from tasks.jobs.data.samples import (
    MOST_STEPS,
    Draws,
    EpochOrder,
    Loader,
    Mapped,
    Order,
    Samples,
    Shares,
    positions,
)
from tasks.jobs.data.sources import Mixture, open_source, source_identity
from tasks.jobs.training.network import build_network, next_token_loss

LENGTH, EOD = 4, 63
CPU = torch.device("cpu")
TINY = NetworkConfig(layers=2, hidden_size=32, heads=2, kv_heads=2, intermediate_size=64)


def corpus(first, *, samples=10, seed=7):
    """Tokens that tell which corpus they are of."""
    return Samples(Mapped(np.arange(first, first + samples * LENGTH + 1, dtype=np.uint16)), length=LENGTH, seed=seed)


class Counting:
    """A source that notes what is asked of it, and may be held up."""

    def __init__(self, source):
        self.source, self.count, self.asked, self.go = source, source.count, [], threading.Event()
        self.go.set()

    def batch(self, consumed, size):
        self.go.wait()
        self.asked.append(consumed)
        return self.source.batch(consumed, size)

    def close(self, *, done):
        self.asked.append(done)


def rows(batches):
    return torch.cat([torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1) for batch in batches]).tolist()


@pytest.mark.parametrize("ahead", [1, 3])
def test_what_is_read_ahead_is_what_is_read_when_asked(ahead):
    samples, shares = corpus(0), Shares(1, 2, 8, 2)
    loader = Loader(samples, shares, device=CPU, ahead=ahead)
    for consumed in [0, 8, 16, 24, 96, 104, 8, 16]:  # over epochs, past what was left out, and back
        assert rows(loader.take(consumed)) == rows(shares.micro_batches(samples, consumed))
    loader.close(done=True)


def test_so_many_batches_are_read_ahead_and_none_twice():
    source = Counting(corpus(0))
    loader = Loader(source, Shares(0, 1, 8, 2), device=CPU, ahead=2)
    loader.take(0)
    loader.take(8)
    loader.close(done=False)
    asked = source.asked[:-1]
    assert asked == list(range(0, 8 * len(asked), 8)) and 2 <= len(asked) <= 2 + 2 + MOST_STEPS
    assert source.asked[-1] is False


def test_an_error_of_the_thread_is_raised_where_its_batch_is_asked_for():
    class Broken(Counting):
        def batch(self, consumed, size):
            if consumed == 8:
                raise OSError("the disk is gone")
            return super().batch(consumed, size)

    loader = Loader(Broken(corpus(0)), Shares(0, 1, 8, 2), device=CPU, ahead=2)
    loader.take(0)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.take(8)
    assert loader.take(16)
    loader.close(done=False)


def test_the_order_holds_the_epochs_that_it_needs_only():
    order = Order(7, 10)
    places = np.arange(8, 35, dtype=np.int64)
    whole = order.at(places)
    assert whole.tolist() == [int(Order(7, 10).at(places[at : at + 1])[0]) for at in range(len(places))]
    assert len(order._epochs) == 2


@pytest.mark.parametrize("count", [1, 2, 1000, 100_000])
def test_an_epoch_is_in_the_order_of_its_draws_however_it_is_asked_for(count, monkeypatch):
    monkeypatch.setattr(samples, "PART", 1 << 10)
    draws = np.random.PCG64([7, 3]).random_raw(count)
    whole = np.argsort(draws, kind="stable")
    assert np.array_equal(EpochOrder(7, 3, count).at(np.arange(count)), whole)
    order, places = EpochOrder(7, 3, count), np.random.default_rng(1).integers(count, size=200)
    assert [int(order.at(places[at : at + 1])[0]) for at in range(len(places))] == whole[places].tolist()
    assert len(order._sorted) <= samples.KEPT


@pytest.mark.parametrize("shares", [(0.7, 0.3), (1.0, 1.0, 1.0), (5.0, 0.01, 2.5, 1.0), (1e-9, 1.0)])
def test_every_place_draws_from_one_corpus_and_the_shares_hold_at_any_place(shares):
    draws = Draws(shares)
    counts = draws.before(np.arange(5001, dtype=np.int64))
    assert (counts.sum(axis=1) == np.arange(5001)).all() and set(np.unique(np.diff(counts, axis=0))) <= {0, 1}
    wanted = np.outer(np.arange(5001), np.array(shares) / sum(shares))
    assert np.abs(counts - wanted).max() < 2
    corpora, places = draws.at(0, 5000)
    for number in range(len(shares)):
        assert places[corpora == number].tolist() == list(range(int((corpora == number).sum())))
    far = 1 << 39
    assert draws.before(np.array([far]))[0].sum() == far


def test_the_draws_are_the_ones_that_the_first_release_had():
    """Resuming a mixture breaks when this changes."""
    corpora, places = Draws((0.5, 0.3, 0.2)).at(4, 12)
    assert corpora.tolist() == [2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0]
    assert places.tolist() == [1, 2, 1, 3, 2, 4, 2, 5, 3, 6, 3, 7]


def test_a_mixture_is_the_same_on_any_number_of_ranks_and_from_any_place():
    mixture = Mixture([corpus(0), corpus(1000, samples=7)], (2.0, 1.0))
    alone = mixture.batch(0, 48)
    assert sum(row[0] >= 1000 for row in alone) == 16
    for world_size in (2, 4):
        found = [
            row
            for consumed in range(0, 48, 8)
            for rank in range(world_size)
            for row in rows(Shares(rank, world_size, 8, 2).micro_batches(mixture, consumed))
        ]
        assert found == alone.tolist()
    assert np.array_equal(mixture.batch(5, 20), alone[5:25])


def test_a_corpus_comes_in_its_own_order_and_again_when_it_is_used_up():
    small, mixture = corpus(1000, samples=3), Mixture([corpus(0), corpus(1000, samples=3)], (1.0, 1.0))
    drawn = [row for row in mixture.batch(0, 12).tolist() if row[0] >= 1000]
    assert drawn == small.batch(0, 6).tolist()


def tokens_folder(folder, documents, *, tokenizer="one", eod=EOD):
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 64, "eod_id": eod}))
    writer = TokenWriter(folder / "train_text_document", 64)
    for document in documents:
        writer.add_document([*document, eod])
    writer.close()
    return folder


@pytest.fixture
def inputs(tmp_path):
    own = tokens_folder(tmp_path / "own", [range(20), range(20)])
    return {"tokens": own, "tokens-prose": tokens_folder(tmp_path / "prose", [range(40, 60)])}


MIXED = TrainingConfig(sequence_length=LENGTH, mixture={"code": 3.0, "tokens/prose@12345678": 1.0})


def test_a_job_opens_the_mixture_that_it_was_given(inputs):
    drawn = open_source(inputs, MIXED, ExecutionConfig()).batch(0, 16)
    assert sum(row.max() in range(40, 61) for row in drawn[:, :2]) == 4
    plain = TrainingConfig(sequence_length=LENGTH)
    assert not np.array_equal(drawn, open_source(inputs, plain, ExecutionConfig()).batch(0, 16))


def test_the_order_in_which_the_shares_are_written_changes_nothing(inputs):
    other = MIXED.model_copy(update={"mixture": dict(reversed(MIXED.mixture.items()))})
    drawn = [open_source(inputs, config, ExecutionConfig()).batch(0, 16) for config in (MIXED, other)]
    assert np.array_equal(*drawn)


def test_the_identity_of_a_mixture_is_that_of_every_corpus(inputs):
    own = source_identity(inputs, TrainingConfig(sequence_length=LENGTH))
    mixed = source_identity(inputs, MIXED)
    assert mixed["code"] == own and list(mixed) == ["code", "prose"] and mixed["prose"] != own


def test_tokens_of_another_tokenizer_are_refused(inputs, tmp_path):
    for number, other in enumerate(({"tokenizer": "two"}, {"eod": 62})):
        inputs["tokens-prose"] = tokens_folder(tmp_path / f"other{number}", [range(40, 60)], **other)
        with pytest.raises(ValueError, match="two tokenizers.*preprocess one of them again"):
            open_source(inputs, MIXED, ExecutionConfig())


def test_a_corpus_that_the_job_was_not_given_is_named(inputs):
    del inputs["tokens-prose"]
    with pytest.raises(ValueError, match="not given code, prose"):
        open_source(inputs, MIXED, ExecutionConfig())


@pytest.mark.parametrize(
    ("mixture", "said"), [({"code": 1.0}, "one part, code"), ({"a": 1.0, "b": 0.0}, "mixture.b 0 is no share")]
)
def test_what_is_no_mixture_is_refused(mixture, said):
    with pytest.raises(ValueError, match=said):
        TrainingConfig(mixture=mixture)


def test_positions_begin_anew_at_each_end_of_document():
    inputs = torch.tensor([[5, 6, EOD, 7, 8, 9], [EOD, EOD, 1, 2, EOD, 3], [1, 2, 3, 4, 5, 6]])
    assert positions(inputs, EOD).tolist() == [[0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5]]


def gradients(config, inputs, targets, weights, places):
    """Gradient of the loss of some predictions with respect to each position's embedding: what those predictions see."""
    network = build_network(config, vocab_size=64, eod=EOD)
    seen = []

    def keep(_, __, output):
        output.retain_grad()
        seen.append(output)

    network.get_input_embeddings().register_forward_hook(keep)
    logits = network(input_ids=inputs, position_ids=places, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="none")
    (losses * weights).sum().backward()
    return seen[0].grad[0].abs().sum(dim=-1), losses.detach()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_document_does_not_see_another_one(architecture):
    config = TrainingConfig(sequence_length=12, network=TINY.model_copy(update={"architecture": architecture}))
    row = torch.tensor([[1, 2, 3, 4, EOD, 5, 6, 7, EOD, 8, 9, 10, 11]])
    inputs, targets = row[:, :-1], row[:, 1:]
    documents = [range(4), range(4, 8), range(8, 12)]
    places = positions(inputs, EOD)
    network = build_network(config, vocab_size=64, eod=EOD)
    assert not torch.allclose(
        next_token_loss(network, inputs, targets, places), next_token_loss(network, inputs, targets)
    )
    for own in documents:
        weights = torch.tensor([float(place in own) for place in range(12)])
        masked, losses = gradients(config, inputs, targets, weights, places)
        assert masked.nonzero().flatten().tolist() == list(own)
        open_, _ = gradients(config, inputs, targets, weights, None)
        assert open_.nonzero().flatten().tolist() == list(range(own[-1] + 1))
        alone = next_token_loss(
            build_network(config, vocab_size=64, eod=EOD), inputs[:, list(own)], targets[:, list(own)]
        )
        assert torch.allclose(losses[list(own)].mean(), alone, atol=1e-5)


def test_a_loader_hands_positions_on_where_documents_are_masked():
    samples = Samples(Mapped(np.array([1, 2, EOD, 3, 4, 5, EOD, 6, 7], np.uint16)), length=LENGTH, seed=7)
    loader = Loader(samples, Shares(0, 1, 2, 1), device=CPU, ahead=1, eod=EOD)
    batches = loader.take(0)
    loader.close(done=True)
    assert all(torch.equal(batch.positions, positions(batch.inputs, EOD)) for batch in batches)
    starts = [int(begin) for _, begin in pairwise([0, *torch.cat([b.positions for b in batches])[:, 0].tolist()])]
    assert starts == [0, 0]
