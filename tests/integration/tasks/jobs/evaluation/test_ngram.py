"""The baselines: a case computed by hand, sums of 1, blocks, document boundaries, and that a bigram learns order."""

import numpy as np
import pytest

from tasks.jobs.evaluation import ngram

EOD = 0


def probabilities(model, context, vocab_size):
    """P(. | context) over the whole vocabulary."""
    tokens = np.arange(vocab_size)
    return 2.0 ** -model.bits(tokens, np.full(vocab_size, context))


def chain(count, vocab_size, *, seed=0):
    """Documents in which a token is mostly followed by its successor; the ids 1 to vocab_size - 1 occur, and eod."""
    generator = np.random.default_rng(seed)
    stream, token = [], 1
    for step in generator.choice([1, 1, 1, 2, 5], count):
        token = (token - 1 + step) % (vocab_size - 1) + 1
        stream.append(token)
        if len(stream) % 50 == 0:
            stream[-1] = EOD
    return np.array([*stream, EOD], dtype=np.uint16)


def test_small_case_by_hand():
    # Pairs: (0,1) x3, (1,2) x2, (2,0) x2, (1,3), (3,0); n1 = 2, n2 = 2, so D = 2 / (2 + 4) = 1/3.
    # Contexts of 0, 1, 2, 3: 2, 1, 1, 1 of 5; n1 = 3, n2 = 1, so D' = 3/5, and 3/5 x 4/5 is spread over 5 tokens.
    model = ngram.fit_bigram(np.array([1, 2, 0, 1, 2, 0, 1, 3, 0], dtype=np.uint16), 5, eod_id=EOD)
    uniform = 3 / 5 * 4 / 5 / 5
    lower = [1.4 / 5 + uniform, 0.4 / 5 + uniform, 0.4 / 5 + uniform, 0.4 / 5 + uniform, uniform]
    left = 1 / 3 * 2 / 3
    after_one = [left * lower[0], left * lower[1], (5 / 3) / 3 + left * lower[2], (2 / 3) / 3 + left * lower[3]]
    assert probabilities(model, 1, 5) == pytest.approx([*after_one, left * lower[4]])
    assert probabilities(model, 4, 5) == pytest.approx(lower)
    assert model.lower == pytest.approx(lower)


def test_unigram_by_hand():
    # Counts 3, 1, 1, 2 and 0: n1 = 2, n2 = 1, D = 1/2; 1/2 x 4 / 7 is spread over 5 tokens.
    model = ngram.fit_unigram(np.array([0, 0, 0, 1, 2, 3, 3]), 5)
    shared = 0.5 * 4 / 7 / 5
    assert model.probabilities == pytest.approx(
        [2.5 / 7 + shared, 0.5 / 7 + shared, 0.5 / 7 + shared, 1.5 / 7 + shared, shared]
    )


@pytest.mark.parametrize("context", [EOD, 1, 17, 39, 45, 59])
def test_probabilities_sum_to_one_for_seen_and_unseen_contexts(context):
    stream = chain(2000, 40)
    for model in (ngram.fit_bigram(stream, 60, eod_id=EOD), ngram.fit_unigram(stream, 60)):
        found = probabilities(model, context, 60)
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        assert (found > 0).all()


@pytest.mark.parametrize("stream", [[1, 1, 1, 1, 1, 0] * 4, [1, 2, 3, 4, 5, 0], [0, 0, 0, 0]])
def test_streams_without_singletons_or_pairs_still_leave_room_for_the_unseen(stream):
    model = ngram.fit_bigram(np.array(stream), 8, eod_id=EOD)
    for context in range(8):
        found = probabilities(model, context, 8)
        assert found.sum() == pytest.approx(1.0)
        assert (found > 0).all()


def test_bigram_beats_unigram_on_ordered_data_and_neither_wins_on_noise():
    train, heldout = chain(50_000, 200), chain(5000, 200, seed=1)
    lengths = np.array([len(heldout)])
    bigram = ngram.document_bits(ngram.fit_bigram(train, 200, eod_id=EOD), heldout, lengths, eod_id=EOD)
    unigram = ngram.document_bits(ngram.fit_unigram(train, 200), heldout, lengths, eod_id=EOD)
    assert unigram[0] / len(heldout) == pytest.approx(np.log2(200), abs=0.2)
    assert 1.3 < bigram[0] / len(heldout) < 2.2  # the entropy of 3/5, 1/5, 1/5 is 1.37 bits; document ends cost more

    noise = np.random.default_rng(0).integers(0, 200, 50_000)
    bits = ngram.fit_bigram(noise, 200, eod_id=EOD).bits(
        noise[:5000], np.random.default_rng(1).permutation(noise[:5000])
    )
    assert bits.mean() > np.log2(200) - 0.1


def test_document_bits_start_every_document_after_eod():
    model = ngram.fit_bigram(chain(2000, 40), 40, eod_id=EOD)
    documents = [[5, 6, 7], [0], [], [9, 0]]
    joined = np.array([token for document in documents for token in document], dtype=np.uint16)
    found = ngram.document_bits(model, joined, np.array([3, 1, 0, 2]), eod_id=EOD)
    for bits, document in zip(found, documents, strict=True):
        expected = model.bits(np.array(document, dtype=int), np.array([EOD, *document], dtype=int)[: len(document)])
        assert bits == pytest.approx(expected.sum())


def test_fitting_block_by_block_changes_nothing(monkeypatch):
    stream = chain(5000, 40)
    whole = ngram.fit_bigram(stream, 40, eod_id=EOD), ngram.fit_unigram(stream, 40)
    monkeypatch.setattr(ngram, "BLOCK_TOKENS", 137)
    parts = ngram.fit_bigram(stream, 40, eod_id=EOD), ngram.fit_unigram(stream, 40)
    assert np.array_equal(whole[0].codes, parts[0].codes)
    assert np.array_equal(whole[0].discounted, parts[0].discounted)
    assert np.array_equal(whole[0].backoff, parts[0].backoff)
    assert np.array_equal(whole[1].probabilities, parts[1].probabilities)


def test_a_long_stream_gives_evenly_spaced_blocks_and_a_short_one_all(monkeypatch):
    stream = np.arange(1000)
    assert np.shares_memory(ngram.sampled(stream), stream) and np.array_equal(ngram.sampled(stream), stream)
    monkeypatch.setattr(ngram, "MOST_TOKENS", 50)
    monkeypatch.setattr(ngram, "SAMPLE_BLOCK_TOKENS", 10)
    found = ngram.sampled(stream).reshape(5, 10)
    assert found[:, 0].tolist() == [0, 247, 495, 742, 990]
    assert (np.diff(found, axis=1) == 1).all() and found[-1, -1] == 999


def test_a_vocabulary_of_two_hundred_thousand_needs_no_square_matrix():
    generator = np.random.default_rng(0)
    stream = generator.integers(0, 200_000, 100_000).astype(np.int32)
    model = ngram.fit_bigram(stream, 200_000, eod_id=199_999)
    assert len(model.codes) <= len(stream)
    assert probabilities(model, int(stream[0]), 200_000).sum() == pytest.approx(1.0)
