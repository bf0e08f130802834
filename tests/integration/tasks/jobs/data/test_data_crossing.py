"""Near duplicates between the corpora of a mixture across the split: found by what is held out, and refused above a share."""

import json
import random
from dataclasses import dataclass, field, replace

import pytest
from fake_megatron import write_checkout

from tasks.common.process import read_json
from tasks.config.data import PreprocessingConfig, TokenizerConfig
from tasks.config.training import ExecutionConfig, MegatronConfig, TrainingConfig
from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.tokenizing.splits import split_of
from tasks.formats.mmididx import TokenWriter
from tasks.jobs import train, train_megatron
from tasks.jobs.data.crossing import FILE, crossings, require_apart
from tasks.jobs.node.runtime import Rank
from tasks.jobs.preprocess import save_tokenizer, train_tokenizer

FRACTION = 0.2
SPLITS = ("train", "heldout")
MIXED = TrainingConfig(mixture={"code": 2.0, "prose": 1.0})


def document(seed):
    """200 words that no other document has in this order."""
    dice = random.Random(seed)
    return " ".join(f"w{dice.randrange(500)}" for _ in range(200))


def nearly(text):
    """The same text with one word more: it may be on the other side of the split."""
    return f"{text} {len(text)}"


def side(text):
    return split_of(text, (1 - FRACTION, FRACTION))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": document(n)}) + "\n" for n in range(40)))
    config = PreprocessingConfig(tokenizer=TokenizerConfig(vocab_size=300), heldout_fraction=FRACTION)
    return train_tokenizer(cut(find_shards([folder / "text.jsonl"]), 1 << 20), config)


def tokens(folder, texts, tokenizer):
    """Their two splits, by the hash of each, as preprocessing divides."""
    eod = tokenizer.token_to_id("<|endoftext|>")
    folder.mkdir()
    for number, split in enumerate(SPLITS):
        writer = TokenWriter(folder / f"{split}_text_document", 300)
        for text in texts:
            if side(text) == number:
                writer.add_document([*tokenizer.encode(text).ids, eod])
        writer.close()
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 300, "eod_id": eod}))
    save_tokenizer(tokenizer, folder / "tokenizer")
    return folder


@dataclass
class Corpora:
    """The job of a mixture of two corpora, before its folders are written."""

    folder: object
    tokenizer: object
    own: list = field(default_factory=lambda: [document(number) for number in range(100)])
    other: list = field(default_factory=lambda: [document(number) for number in range(1000, 1100)])

    def rank(self):
        inputs = {
            "tokens": tokens(self.folder / "own", self.own, self.tokenizer),
            "tokens-prose": tokens(self.folder / "other", self.other, self.tokenizer),
        }
        return Rank(self.folder, 0, 1, 1, {}, inputs, self.folder / "out")


@pytest.fixture
def two(tmp_path, tokenizer):
    return Corpora(tmp_path, tokenizer)


def found(rank):
    return crossings({"code": rank.inputs["tokens"], "prose": rank.inputs["tokens-prose"]}, rank)


def crossing(texts, *, held):
    """Of the texts those whose near duplicate is on the other side, they themselves on the side of `held`."""
    return [text for text in texts if side(text) == held and side(nearly(text)) == 1 - held]


def test_a_near_duplicate_across_the_split_is_found_from_both_corpora(two):
    here, there = crossing(two.own, held=1)[:3], crossing(two.own, held=0)[:2]
    assert (len(here), len(there)) == (3, 2)
    two.other += map(nearly, [*here, *there])
    code, prose = found(two.rank())
    assert (code.corpus, code.heldout, code.crossed, code.others) == ("code", sum(map(side, two.own)), 3, ("prose",))
    assert (prose.heldout, prose.crossed, prose.others) == (sum(map(side, two.other)), 2, ("code",))


def test_equal_documents_do_not_cross(two):
    two.other = two.own
    assert [each.crossed for each in found(two.rank())] == [0, 0]


def test_near_duplicates_on_one_side_do_not_cross(two):
    two.other += [nearly(text) for text in two.own if side(text) == side(nearly(text))]
    assert [each.crossed for each in found(two.rank())] == [0, 0]


def test_near_duplicates_within_a_corpus_are_the_validations(two):
    two.own += map(nearly, crossing(two.own, held=1))
    assert [each.crossed for each in found(two.rank())] == [0, 0]


def test_a_run_is_refused_above_the_share_and_told_below(two, capsys):
    two.other += map(nearly, crossing(two.own, held=1)[:2])
    rank = two.rank()
    share = 2 / sum(map(side, two.own))
    with pytest.raises(
        ValueError, match=r"2 of \d+ held-out documents of code .* training reads of prose; .*0.01. Publish"
    ):
        require_apart(rank, MIXED, ExecutionConfig())
    assert read_json(rank.folder / FILE)[0]["crossed"] == 2
    checkout = write_checkout(two.folder / "megatron-lm")
    execution = ExecutionConfig(megatron=MegatronConfig(checkout=str(checkout), transformer_impl="local"))
    settings = {"training": MIXED.model_dump(mode="json"), "execution": execution.model_dump(mode="json")}
    for engine in (train, train_megatron):
        with pytest.raises(ValueError, match="2 of"):
            engine.run(replace(rank, settings=settings))
    require_apart(rank, MIXED, ExecutionConfig(max_crossing_share=share))
    assert "2 of" in capsys.readouterr().out
    (rank.folder / FILE).unlink()
    require_apart(rank, MIXED, ExecutionConfig(max_crossing_share=1))
    require_apart(rank, TrainingConfig(), ExecutionConfig())
    assert not (rank.folder / FILE).exists()


def test_corpora_that_hold_nothing_out_need_no_tokenizer(two):
    rank = two.rank()
    for folder in rank.inputs.values():
        (folder / "heldout_text_document.idx").unlink()
        (folder / "tokenizer" / "tokenizer.json").write_text("none")
    assert found(rank) == []
