"""Benchmark documents inside training documents: what is held, what is boilerplate, and what is too much to hold."""

import pytest

from tasks.data.corpus.measures import Texts
from tasks.data.corpus.parts import NGRAM, SHORTEST, held, learn
from tasks.data.corpus.tokens import read_words


def sentence(name, count):
    return " ".join(f"{name}{number}" for number in range(count))


def found(benchmarks, *texts):
    made = Texts.of(list(texts))
    return held(read_words(made.buffer, made.starts), benchmarks).tolist()


QUESTION = sentence("q", 40)


def test_a_document_that_holds_a_benchmark_document_is_told_by_the_benchmark():
    benchmarks = learn([[[sentence("other", 30)]], [[sentence("a", 20)], [QUESTION]]])
    around = sentence("before", 50)
    assert found(
        benchmarks, around, f"{around} {QUESTION} {around}", QUESTION.upper().replace(" ", ", "), "", sentence("other", 30)
    ) == [-1, 1, 1, -1, 0]  # fmt: skip


def test_half_of_the_runs_is_the_limit():
    benchmarks = learn([[[QUESTION]]])
    runs = 40 - NGRAM + 1
    words = QUESTION.split()
    enough = " ".join(words[: NGRAM - 1 + runs // 2])
    assert found(benchmarks, enough, enough.rsplit(" ", 1)[0]) == [0, -1]
    apart = " ".join([*words[:20], "x", *words[20:]])
    assert found(benchmarks, apart) == [0]


def test_a_licence_in_both_contaminates_nothing():
    licence = sentence("licence", 60)
    benchmarks = learn([[[f"{licence} {sentence('question', 100)}"]]])
    assert found(benchmarks, f"{licence} {sentence('code', 100)}", f"x {licence} {sentence('question', 100)}") == [
        -1,
        0,
    ]


def test_short_benchmark_documents_count_whole_and_the_shortest_not_at_all():
    short = [sentence(f"s{size}x", size) for size in range(1, NGRAM)]
    benchmarks = learn([[short]])
    assert benchmarks.too_short == SHORTEST - 1
    texts = [f"before {text} after" for text in short]
    assert found(benchmarks, *texts) == [-1] * (SHORTEST - 1) + [0] * (NGRAM - SHORTEST)
    assert found(benchmarks, *(text.rsplit(" ", 1)[0] for text in short)) == [-1] * len(short)


def test_a_run_that_two_benchmark_documents_have_counts_for_both():
    shared = sentence("shared", NGRAM)
    benchmarks = learn([[[f"{shared} {sentence('a', 60)}"]], [[shared]]])
    assert found(benchmarks, shared, f"{shared} {sentence('a', 60)}") == [1, 0]


def test_benchmarks_that_are_corpora_are_refused():
    with pytest.raises(ValueError, match=r"more than 100 runs of 13 words.*validation\.benchmarks"):
        learn([[[sentence("long", 200)]]], most=100)
