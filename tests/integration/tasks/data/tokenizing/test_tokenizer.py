"""A tokenizer is opened as AutoTokenizer opens it, without the import where that is sure to be the same."""

import json
import subprocess
import sys

import pytest
from token_material import AWKWARD, END, KINDS, make_tokenizer

from tasks.data.tokenizing.engine import Tokenizers
from tasks.data.tokenizing.tokenizer import open_tokenizer

pytestmark = pytest.mark.unit


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return make_tokenizer(request.param, tmp_path / request.param)


def test_size_end_and_tokens_are_those_of_auto_tokenizer(folder):
    _same_as_auto_tokenizer(folder)


@pytest.mark.integration
@pytest.mark.parametrize(
    "folder", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])], indirect=True
)
def test_the_usual_folders_need_no_transformers(folder):
    code = (
        "import sys; from tasks.data.tokenizing.tokenizer import open_tokenizer; "
        f"open_tokenizer({str(folder)!r}).require_eod(); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"pad_token": "<a token that is new>"},
        {"added_tokens_decoder": {"1500": {"content": "<new>", "special": True}}},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_transformers_adds_or_rebuilds_is_there(tmp_path, change):
    folder = make_tokenizer("bytes", tmp_path / "t")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **change}))
    _same_as_auto_tokenizer(folder)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path):
    rules = json.loads((make_tokenizer("gpt2", tmp_path / "gpt2") / "tokenizer.json").read_text())
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(rules["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in rules["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    _same_as_auto_tokenizer(folder)


def test_the_end_of_document_may_be_the_separator(tmp_path):
    folder = make_tokenizer("bytes", tmp_path / "t")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "sep_token": END})
    )
    assert open_tokenizer(folder).eod == 0


def test_no_end_of_document_is_said_when_one_is_asked_for(tmp_path):
    folder = make_tokenizer("bytes", tmp_path / "t")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="no end-of-document token.*eos_token.*--append-eod"):
        open_tokenizer(folder).require_eod()


def test_a_number_beyond_the_type_of_the_file_is_refused(tmp_path):
    folder = make_tokenizer("bytes", tmp_path / "t")
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["vocab"]["zzzzzz"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(ValueError, match="uint16.*70000.*without gaps"):
        open_tokenizer(folder)


@pytest.mark.parametrize("what", ["missing", "no json", "no tokenizer", "empty folder"])
def test_what_is_no_tokenizer_is_named(tmp_path, what):
    folder = tmp_path / "t"
    if what != "missing":
        folder.mkdir()
    if what == "no json":
        (folder / "tokenizer.json").write_text("{")
    if what == "no tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=str(folder)):
        open_tokenizer(folder)


def _same_as_auto_tokenizer(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), open_tokenizer(folder)
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    engine = Tokenizers(ours)
    for text in AWKWARD:
        tokens = [*ours.prefix, *engine.encode([text]).tokens.tolist(), *ours.suffix]
        assert tokens == theirs(text).input_ids, text[:40]


@pytest.mark.integration
def test_code_that_a_tokenizer_brings_is_not_run_whoever_says_yes(tmp_path, monkeypatch):
    """At a terminal transformers would ask, and whoever answers does not know what they are asked."""
    (tmp_path / "config.json").write_text('{"model_type": "evil"}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="no tokenizer that transformers can read"):
        open_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
