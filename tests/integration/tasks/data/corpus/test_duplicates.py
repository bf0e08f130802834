"""Equal and nearly equal documents, in runs and blocks of any size, beside the same found by comparing everything."""

import multiprocessing
import os
import random
import time

import numpy as np
import pytest
from waiting import limit

from tasks.data.corpus import duplicates
from tasks.data.corpus.duplicates import band_records, equal, joined, rows_per_band, similar
from tasks.data.corpus.measures import Texts, content_hashes
from tasks.data.corpus.runs import NEIGHBOURS, RECORD, Run, buckets, ranges, write_run
from tasks.data.corpus.tokens import ngrams, read_words


def written(folder, records, length, *, wide):
    """Records, whose rows rise, as runs of so many records."""
    runs = []
    for start in range(0, len(records), length):
        part = records[start : start + length]
        first = int(part["row"][0])
        run = Run(folder / f"{start:06d}.run", first, wide)
        write_run(run.path, part["key"], part["row"] - first, part["low"] if wide else None)
        assert len(run) == len(part)
        runs.append(run)
    return runs


def first_rows(texts):
    first = {}
    return [-1 if first.setdefault(text, row) == row else first[text] for row, text in enumerate(texts)]


def column(links, rows):
    of = np.full(rows, -1)
    of[links["row"]] = links["of"]
    return of.tolist()


def exact_of(runs, rows, parts=1, block=1 << 20):
    """By ranges for `parts` processes, whose links are joined in the opposite order."""
    links = [equal(buckets(runs, each, block=block)) for each in ranges(parts << 15)]
    assert len(links) == parts
    return column(joined(links[::-1]), rows)


@pytest.mark.parametrize(("length", "parts", "block"), [(7, 1, 100), (100, 64, 30), (10_000, 3, 1 << 20)])
def test_every_copy_names_the_first_row_however_the_records_are_divided(tmp_path, length, parts, block):
    rng = random.Random(length)
    texts = ["often"] * 200 + [f"text {rng.randrange(400)}" for _ in range(1000)]
    rng.shuffle(texts)
    hashes = content_hashes(Texts.of(texts))
    records = np.zeros(len(texts), RECORD)
    records["key"], records["low"], records["row"] = hashes[:, 0], hashes[:, 1], np.arange(len(texts))
    assert exact_of(written(tmp_path, records, length, wide=True), len(texts), parts, block) == first_rows(texts)


@pytest.mark.parametrize("block", [2, 100])
def test_hashes_that_agree_in_one_half_are_not_equal(tmp_path, block):
    records = np.array([(5, 1, 0), (5, 2, 1), (6, 1, 2), (5, 1, 3)], RECORD)
    assert exact_of(written(tmp_path, records, 3, wide=True), 4, block=block) == [-1, -1, -1, 0]


def test_a_hash_of_many_records_is_read_in_blocks_with_the_same_pairs(tmp_path):
    """Each record stands beside its bucket's first and the four before it, wherever a block ends."""
    records = np.zeros(5000, RECORD)
    records["key"], records["row"] = 42, np.arange(5000)
    runs = written(tmp_path, records, 800, wide=False)
    pairs = {}
    for block in (500, 1 << 20):
        read = list(buckets(runs, ranges(1)[0], block=block))
        assert max(len(each) for each, _ in read) <= block + 1 + NEIGHBOURS
        alike = pairs[block] = set()
        for each, firsts in read:
            for later, earlier in duplicates._candidates(each["row"], firsts):
                alike |= set(zip(each["row"][later].tolist(), each["row"][earlier].tolist(), strict=True))
    assert pairs[500] == pairs[1 << 20]
    assert {earlier for later, earlier in pairs[500] if later == 3210} == {0, 3206, 3207, 3208, 3209}


def test_rows_that_are_passed_over_are_nobodys_first_and_nobodys_neighbours(tmp_path):
    records = np.zeros(10, RECORD)
    records["row"] = np.arange(10)
    without = np.zeros(10, bool)
    without[[0, 4, 9]] = True
    for block in (3, 100):
        read = list(buckets(written(tmp_path, records, 4, wide=False), ranges(1)[0], without=without, block=block))
        assert column(joined(equal([each]) for each in read), 10) == [-1, -1, 1, 1, -1, 1, 1, 1, 1, -1]


def test_the_highest_and_the_lowest_hash_are_in_a_range(tmp_path):
    keys = np.array([0, 2**64 - 1, 2**63, 0, 2**64 - 1], np.uint64)
    records = np.zeros(5, RECORD)
    records["key"], records["row"] = keys, np.arange(5)
    assert exact_of(written(tmp_path, records, 2, wide=False), 5, parts=7, block=1) == [-1, -1, -1, 0, 1]


def words_of(texts):
    made = Texts.of(texts)
    return read_words(made.buffer, made.starts)


def jaccard(one, other):
    shingles = ngrams(words_of([one, other]), duplicates.SHINGLE)
    left, right = (set(shingles.hashes[shingles.bounds[i] : shingles.bounds[i + 1]].tolist()) for i in (0, 1))
    return len(left & right) / len(left | right)


def signatures(words):
    """In a process of its own, as validation makes them: other tests fork workers from this one, without rensa's threads."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(duplicates.signatures, (words,))


def test_signatures_made_before_a_fork_are_refused_after_it_instead_of_waiting_without_end():
    words = words_of(["one two three four five six seven"])
    with multiprocessing.get_context("fork").Pool(1, duplicates.signatures, (words,)) as pool:
        assert pool.apply(_exit_code_in_a_fork, (words,)) == 7


def _exit_code_in_a_fork(words):
    if not (child := os.fork()):
        try:
            duplicates.signatures(words)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def marked(folder, texts, threshold, block=1 << 20):
    values, has = signatures(words_of(texts))
    return near(folder, values, np.flatnonzero(has), threshold, block)


def near(folder, values, rows, threshold, block=1 << 20, since=0):
    records = band_records(rows, values[rows], rows_per_band(threshold))
    runs = written(folder, records, len(records), wide=False)
    links = similar(buckets(runs, ranges(1)[0], block=block), lambda wanted: values[wanted], threshold, since=since)
    of, similarity = np.full(len(values), -1), np.zeros(len(values), np.float32)
    of[links["row"]], similarity[links["row"]] = links["of"], links["similarity"]
    return of, similarity


def original(rng, size=300):
    return [f"w{rng.randrange(10_000)}" for _ in range(size)]


def edited(rng, words, edits):
    changed = list(words)
    for place in rng.sample(range(len(words)), edits):
        changed[place] = f"x{rng.randrange(10_000)}"
    return changed


def test_the_estimate_is_the_jaccard_similarity_of_shingles():
    rng = random.Random(1)
    pairs = []
    for edits in (0, 2, 5, 10, 20, 40, 60) * 6:
        words = original(rng)
        pairs.append((" ".join(words), " ".join(edited(rng, words, edits))))
    values, _ = signatures(words_of([text for pair in pairs for text in pair]))
    estimates = (values[::2] == values[1::2]).mean(axis=1)
    errors = [float(estimate) - jaccard(*pair) for estimate, pair in zip(estimates, pairs, strict=True)]
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.045  # sqrt(s (1 - s) / 128) is 0.044 at the most


@pytest.mark.parametrize(("threshold", "block"), [(0.8, 1 << 20), (0.8, 50), (0.5, 1 << 20)])
def test_edited_copies_are_found_and_different_texts_are_not(tmp_path, threshold, block):
    rng = random.Random(2)
    originals = [original(rng) for _ in range(60)]
    texts = [" ".join(words) for words in originals] + [" ".join(edited(rng, words, 3)) for words in originals]
    near_of, similarity = marked(tmp_path, texts, threshold, block)
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
    began = time.process_time()
    near_of, _ = near(tmp_path, values, np.arange(20_000), 0.8)
    assert near_of.tolist() == [-1] + [0] * 19_999
    assert time.process_time() - began < limit(10)


def test_documents_of_earlier_corpora_are_linked_to_and_not_linked_themselves(tmp_path):
    values, _ = signatures(words_of(["one two three four five six seven"]))
    of, _ = near(tmp_path, np.repeat(values, 10, axis=0), np.arange(10), 0.8, since=6)
    assert of.tolist() == [-1] * 6 + [0] * 4


def test_signatures_do_not_depend_on_what_else_is_in_the_batch():
    rng = random.Random(4)
    texts = [" ".join(original(rng, size)) for size in (10, 300, 3000, 6)]
    together, _ = signatures(words_of(texts))
    for text, values in zip(texts, together, strict=True):
        assert (signatures(words_of([text]))[0][0] == values).all()
