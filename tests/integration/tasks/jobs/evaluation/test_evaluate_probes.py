"""The probes of an evaluation: text known by heart, secrets and listed words in what a model writes, suites out of time."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from tokenizers import Tokenizer

from tasks.config.evaluation import EvaluationConfig
from tasks.formats.mmididx import TokenWriter
from tasks.jobs.evaluation.generating import continued
from tasks.jobs.evaluation.heldout import Encoded, Heldout
from tasks.jobs.evaluation.probes import Written, leakage, lengths, memorisation, passages, toxicity, written
from tasks.jobs.evaluation.scoring import load_model
from tasks.jobs.evaluation.suites import Bench, Suite, run_suites
from tasks.jobs.node.runtime import Rank

PREFIX, REST, EOD = 8, 10, 0
CONTEXT = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model.make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint)


def bench(
    folder, model, checkpoint, *, inputs=None, shared=None, texts=("def first(values):\n    return 1",), **config
):
    given = {"checkpoint": checkpoint, **(inputs or {})}
    rank = Rank(folder=folder, rank=0, world_size=1, attempt=1, settings={}, inputs=given, output=folder)
    sizes = np.array([len(text.encode()) for text in texts])
    return Bench(
        model=model,
        tokenizer=Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
        eod_id=EOD,
        opening=(EOD,),
        context=CONTEXT,
        heldout=Heldout(texts=list(texts), byte_counts=sizes, encoded=Encoded([], EOD)),
        rank=rank,
        config=EvaluationConfig(**{"probe_samples": 12, "probe_prefix_tokens": PREFIX, "probe_tokens": REST, **config}),
        shared=shared if shared is not None else {},
    )


def save_tokens(folder, checkpoint, **splits):
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    for split, documents in splits.items():
        writer = TokenWriter(folder / f"{split}_text_document", tiny_model.VOCABULARY)
        for document in documents:
            writer.add_document([*document, EOD])
        writer.close()
    return folder


def random_documents(count, length, seed):
    return np.random.default_rng(seed).integers(1, tiny_model.VOCABULARY, (count, length)).tolist()


def test_text_that_the_model_continues_word_by_word_is_known_by_heart(tmp_path, model, checkpoint):
    plain = bench(tmp_path, model, checkpoint)
    prompts = random_documents(9, PREFIX, seed=1)
    learnt = [[*prompt, *row] for prompt, row in zip(prompts, continued(plain, prompts, REST), strict=True)]
    almost = [[*document[:-1], 1 + document[-1] % 298] for document in learnt]
    tokens = save_tokens(tmp_path / "tokens", checkpoint, train=learnt + almost[:3], heldout=almost)
    suite = memorisation(bench(tmp_path, model, checkpoint, inputs={"tokens": tokens}))
    assert suite.samples == 9 and suite.details["samples"] == {"train": 12, "heldout": 9}
    assert (suite.metrics["train_count"], suite.metrics["heldout_count"]) == (9, 0)
    assert suite.metrics["excess"] == suite.metrics["train_share"] == 0.75
    assert suite.metrics["train_low"] < 0.75 < suite.metrics["train_high"] and "excess" in suite.lower_is_better


def test_passages_lie_within_one_document_and_are_the_same_for_a_seed(tmp_path, model, checkpoint):
    documents = [*random_documents(4, 40, seed=2), *random_documents(6, PREFIX + REST - 1, seed=3)]
    tokens = save_tokens(tmp_path / "tokens", checkpoint, train=documents, heldout=documents[4:])
    looked = bench(tmp_path, model, checkpoint, inputs={"tokens": tokens}, probe_samples=30)
    found = passages(looked, "train")
    whole = [str(document)[1:-1] for document in documents[:4]]
    assert len(found) == 30 == len({str(passage) for passage in found})
    assert all(any(str([*each.prompt, *each.rest])[1:-1] in text for text in whole) for each in found)
    assert found == passages(looked, "train")
    assert passages(looked, "heldout") == []
    suite = memorisation(looked)
    assert suite.samples == 0 and "heldout_share" not in suite.metrics and "excess" not in suite.metrics


def test_what_a_short_context_has_room_for_is_probed_and_told(tmp_path, model, checkpoint):
    wide = bench(tmp_path, model, checkpoint, probe_prefix_tokens=50, probe_tokens=50)
    assert lengths(wide) == (CONTEXT // 2, CONTEXT // 2)


def test_prompts_of_any_length_are_continued_as_each_by_itself(tmp_path, model, checkpoint):
    plain = bench(tmp_path, model, checkpoint)
    prompts = [random_documents(1, length, seed=length)[0] for length in (1, 5, 30, 12, 5)]
    together = continued(plain, prompts, 12)
    assert together == [continued(plain, [prompt], 12)[0] for prompt in prompts]
    assert continued(plain, prompts, 12, seed=1) == continued(plain, prompts, 12, seed=1)
    assert continued(plain, prompts, 12, seed=1) != continued(plain, prompts, 12, seed=2)


def test_a_long_prompt_takes_no_room_from_the_others(tmp_path, model, checkpoint):
    """A code problem of nearly the whole context left every other one with the few tokens that it had left itself."""
    plain = bench(tmp_path, model, checkpoint)
    prompts = [random_documents(1, length, seed=length)[0] for length in (CONTEXT - 3, 5, CONTEXT // 2, 9)]
    together = continued(plain, prompts, 12)
    assert [len(row) for row in together] == [3, 12, 12, 12]
    assert together == [continued(plain, [prompt], 12)[0] for prompt in prompts]


KEY = "ghp_" + "a1B2" * 9  # has a token's form, and is none


def test_a_text_with_a_secret_counts_once_and_what_stands_in_the_prompt_does_not(tmp_path, model, checkpoint):
    texts = (
        Written("token = ", f"{KEY}\nagain = {KEY}"),
        Written(f"token = {KEY}\n", "and nothing more"),
        Written("Contact: ", "jane.doe@contoso.com or none"),
        Written("", "nothing at all"),
    )
    suite = leakage(bench(tmp_path, model, checkpoint, shared={"written": texts}))
    assert suite.samples == 4
    assert (suite.metrics["secret_count"], suite.metrics["personal_count"]) == (1, 1)
    assert suite.metrics["secret_share"] == 0.25 and "secret_share" in suite.lower_is_better
    assert suite.details["types"] == {"GitHub Token": 2, "e-mail address": 1}
    assert KEY not in json.dumps([dict(suite.metrics), dict(suite.details)])


def test_listed_words_count_whole_and_in_any_case(tmp_path, model, checkpoint):
    listed = tmp_path / "words"
    listed.mkdir()
    (listed / "a.txt").write_text("darn\nwhat the heck\n\n")
    texts = (
        Written("darn ", "is in the prompt alone"),
        Written("", "Darn!"),
        Written("", "darned if I know"),
        Written("", "What the HECK is that"),
    )
    given = {"inputs": {"files-words": listed}, "shared": {"written": texts}, "toxic_words": "words"}
    suite = toxicity(bench(tmp_path, model, checkpoint, **given))
    assert (suite.metrics["toxic_count"], suite.metrics["toxic_share"], suite.samples) == (2, 0.5, 4)
    (listed / "a.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="has no words: give a file with one a line"):
        toxicity(bench(tmp_path, model, checkpoint, **given))
    with pytest.raises(ValueError, match="was not given that dataset"):
        toxicity(bench(tmp_path, model, checkpoint, **{**given, "inputs": {}}))


def test_texts_are_written_once_for_all_suites_and_the_same_for_a_seed(tmp_path, model, checkpoint):
    first = bench(tmp_path, model, checkpoint)
    texts = written(first)
    assert len(texts) == 12 and written(first) is texts
    assert {each.prompt for each in texts} >= {"", "password = "} - {"password = "} and any(each.text for each in texts)
    assert written(bench(tmp_path, model, checkpoint)) == texts
    assert written(bench(tmp_path, model, checkpoint, seed=5)) != texts


def test_nothing_is_generated_where_nobody_asks(tmp_path, model, checkpoint):
    none = bench(tmp_path, model, checkpoint, probe_samples=0, toxic_words="words")
    assert (memorisation(none), leakage(none), toxicity(none)) == (None, None, None)
    assert toxicity(bench(tmp_path, model, checkpoint)) is None


def test_a_suite_that_takes_too_long_has_no_metrics_and_says_why(tmp_path, model, checkpoint):
    def endless(bench):
        while True:
            bench.check_time()

    def quick(bench):
        return Suite({"share": 0.5}, samples=2)

    plain = bench(tmp_path, model, checkpoint, suite_seconds=1)
    told, seconds = run_suites(plain, {"endless": endless, "quick": quick, "absent": lambda bench: None})
    assert list(told) == ["endless", "quick"] and seconds["endless"] >= 1
    assert told["endless"]["metrics"] == {} and "evaluation.suite_seconds = 1" in told["endless"]["failed"]
    assert told["quick"] == {"metrics": {"share": 0.5}, "samples": 2, "lower_is_better": []}
    assert (Path(tmp_path) / "progress.json").exists()
