"""Both engines agree, or the slow one is taken and says why; tokens are put around documents as one would by hand."""

import json
import random
from itertools import chain

import numpy as np
import pytest
from token_material import AWKWARD, KINDS, make_tokenizer, words

from tasks.data.tokenizing.engine import Encoded, Gigatoken, Tokenizers, choose, frame
from tasks.data.tokenizing.tokenizer import open_tokenizer

pytestmark = pytest.mark.unit

TEXTS = {"small": [*AWKWARD[:10], *(words(5, i) for i in range(80))], "large": [words(4000, i) for i in range(2)]}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: open_tokenizer(make_tokenizer(kind, folder / kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", TEXTS)
def test_the_engines_agree_in_one_call_and_in_many(opened, kind, size):
    fast, slow = Gigatoken(opened[kind]).encode(TEXTS[size]), Tokenizers(opened[kind]).encode(TEXTS[size])
    assert np.array_equal(fast.tokens, slow.tokens)
    assert np.array_equal(fast.lengths, slow.lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_nothing(opened, kind):
    for engine in (Gigatoken(opened[kind]), Tokenizers(opened[kind])):
        assert len(engine.encode([]).tokens) == len(engine.encode([]).lengths) == 0


def test_the_fast_one_is_chosen_where_both_agree(opened):
    choice = choose(opened["pieces"], TEXTS["small"])
    assert (choice.engine.name, choice.reason) == ("gigatoken", "")


def test_a_tokenizer_that_the_fast_one_does_not_know_is_encoded_all_the_same(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "there": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    choice = choose(open_tokenizer(tmp_path), ["hello there"])
    assert choice.engine.name == "tokenizers"
    assert choice.reason.startswith("gigatoken")
    assert choice.engine.encode(["hello you there"]).tokens.tolist() == [0, 2, 1]


def test_a_sample_on_which_they_disagree_decides(opened, monkeypatch):
    encode = Gigatoken.encode

    def wrong(self, texts):
        found = encode(self, texts)
        return Encoded((found.tokens + 1) % 1000, found.lengths)

    monkeypatch.setattr(Gigatoken, "encode", wrong)
    choice = choose(opened["bytes"], ["some text"])
    assert choice.engine.name == "tokenizers"
    assert "disagree" in choice.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eod", [None, 7])
def test_documents_are_framed_one_by_one(opened, kind, eod):
    tokenizer, rng = opened[kind], random.Random(1)
    own = [[rng.randrange(500) for _ in range(rng.randrange(6))] for _ in range(200)]
    lengths = np.array([len(document) for document in own], np.int64)
    tokens, framed = frame(Encoded(np.array(list(chain(*own)), np.uint32), lengths), tokenizer, eod)
    wanted = [[*tokenizer.prefix, *document, *tokenizer.suffix] for document in own]
    wanted = [[*document, eod] if document and eod is not None else document for document in wanted]
    assert tokens.tolist() == list(chain(*wanted))
    assert framed.tolist() == [len(document) for document in wanted]
    assert (tokens.dtype, framed.dtype) == (np.uint16, np.int32)
