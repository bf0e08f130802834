"""Equal and nearly equal documents, spilled to small partitions, beside the same found by comparing everything."""

import random
import time

import numpy as np
import pytest
from waiting import limit

from tasks.data.corpus import duplicates
from tasks.data.corpus.duplicates import (
    RECORD,
    Spill,
    band_records,
    groups,
    mark_exact,
    mark_near,
    rows_per_band,
    signatures,
)
from tasks.data.corpus.measures import Texts, content_hashes
from tasks.data.corpus.tokens import ngrams, read_words


def spilled(folder, records, partition):
    with Spill(folder, len(records), partition=partition) as spill:
        for start in range(0, len(records), 97):
            spill.add(records[start : start + 97])
        yield spill


def first_rows(texts):
    first = {}
    return [-1 if first.setdefault(text, row) == row else first[text] for row, text in enumerate(texts)]


@pytest.mark.parametrize("partition", [7, 100, 10_000])
def test_every_copy_names_the_first_row_in_any_partitioning(tmp_path, partition):
    rng = random.Random(partition)
    texts = ["often"] * 200 + [f"text {rng.randrange(400)}" for _ in range(1000)]
    rng.shuffle(texts)
    hashes = content_hashes(Texts.of(texts))
    records = np.zeros(len(texts), RECORD)
    records["key"], records["low"], records["row"] = hashes[:, 0], hashes[:, 1], np.arange(len(texts))
    exact_of = np.full(len(texts), -1)
    for spill in spilled(tmp_path, records, partition):
        mark_exact(spill, exact_of)
    assert exact_of.tolist() == first_rows(texts)
    assert not list(tmp_path.iterdir())


def test_hashes_that_agree_in_one_half_are_not_equal(tmp_path):
    records = np.array([(5, 1, 0), (5, 2, 1), (6, 1, 2), (5, 1, 3)], RECORD)
    exact_of = np.full(4, -1)
    for spill in spilled(tmp_path, records, 100):
        mark_exact(spill, exact_of)
    assert exact_of.tolist() == [-1, -1, -1, 0]


def test_a_partition_of_copies_stays_in_its_bound(tmp_path):
    records = np.zeros(5000, RECORD)
    records["key"], records["row"] = 42, np.arange(5000)
    for spill in spilled(tmp_path, records, 500):
        assert max(len(block) for block, _ in groups(spill)) == 1001


def words_of(texts):
    made = Texts.of(texts)
    return read_words(made.buffer, made.starts)


def jaccard(one, other):
    found = ngrams(words_of([one, other]), duplicates.SHINGLE)
    left, right = (set(found.hashes[found.bounds[i] : found.bounds[i + 1]].tolist()) for i in (0, 1))
    return len(left & right) / len(left | right)


def marked(folder, texts, threshold, partition=1 << 20):
    values, has = signatures(words_of(texts))
    rows = np.flatnonzero(has)
    near_of, similarity = np.full(len(texts), -1), np.zeros(len(texts), np.float32)
    records = band_records(rows, values[rows], rows_per_band(threshold))
    with Spill(folder, len(records), partition=partition) as spill:
        spill.add(records)
        mark_near(spill, values, threshold, near_of, similarity)
    return near_of, similarity


def original(rng, size=300):
    return [f"w{rng.randrange(10_000)}" for _ in range(size)]


def edited(rng, words, edits):
    changed = list(words)
    for place in rng.sample(range(len(words)), edits):
        changed[place] = f"x{rng.randrange(10_000)}"
    return changed


def test_the_estimate_is_the_jaccard_similarity_of_shingles():
    rng = random.Random(1)
    errors = []
    for edits in (0, 2, 5, 10, 20, 40, 60) * 6:
        words = original(rng)
        pair = [" ".join(words), " ".join(edited(rng, words, edits))]
        values, _ = signatures(words_of(pair))
        errors.append(float((values[0] == values[1]).mean()) - jaccard(*pair))
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.045  # sqrt(s (1 - s) / 128) is 0.044 at the most


@pytest.mark.parametrize(("threshold", "partition"), [(0.8, 1 << 20), (0.8, 50), (0.5, 1 << 20)])
def test_edited_copies_are_found_and_different_texts_are_not(tmp_path, threshold, partition):
    rng = random.Random(2)
    originals = [original(rng) for _ in range(60)]
    texts = [" ".join(words) for words in originals] + [" ".join(edited(rng, words, 3)) for words in originals]
    near_of, similarity = marked(tmp_path, texts, threshold, partition)
    assert near_of.tolist() == [-1] * 60 + list(range(60))  # 3 edits of 300 words: a similarity of about 0.9
    real = [jaccard(texts[row], texts[row - 60]) for row in range(60, 120)]
    assert np.abs(similarity[60:] - real).max() < 0.15


def test_most_pairs_at_the_threshold_itself_become_candidates(tmp_path):
    rng = random.Random(3)
    originals = [original(rng) for _ in range(150)]
    texts = [" ".join(words) for words in originals] + [" ".join(edited(rng, words, 6)) for words in originals]
    real = np.array([jaccard(texts[row], texts[row + 150]) for row in range(150)])
    near_of, _ = marked(tmp_path, texts, 0.8)
    above = real > 0.83
    assert (near_of[150:][above] >= 0).mean() > 0.8


def test_documents_of_few_words_have_no_signature(tmp_path):
    texts = ["", "one", "one two three four", "one two three four five", "One, two! three four five?"]
    _, has = signatures(words_of(texts))
    assert has.tolist() == [False, False, False, True, True]
    assert marked(tmp_path, texts, 0.8)[0].tolist() == [-1, -1, -1, -1, 3]


def test_a_cluster_of_thousands_is_linear(tmp_path):
    """Pairs of 20,000 equal signatures would be 2 * 10^8, in each of 16 bands."""
    values, _ = signatures(words_of(["one two three four five six seven"]))
    values = np.repeat(values, 20_000, axis=0)
    near_of, similarity = np.full(20_000, -1), np.zeros(20_000, np.float32)
    began = time.process_time()
    records = band_records(np.arange(20_000), values, 8)
    with Spill(tmp_path, len(records)) as spill:
        spill.add(records)
        mark_near(spill, values, 0.8, near_of, similarity)
    assert near_of.tolist() == [-1] + [0] * 19_999
    assert time.process_time() - began < limit(10)


def test_signatures_do_not_depend_on_what_else_is_in_the_batch():
    rng = random.Random(4)
    texts = [" ".join(original(rng, size)) for size in (10, 300, 3000, 6)]
    together, _ = signatures(words_of(texts))
    for text, values in zip(texts, together, strict=True):
        assert (signatures(words_of([text]))[0][0] == values).all()
