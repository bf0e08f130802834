"""Evaluation of a tiny Llama: bits equal a token-by-token loop, long documents, other tokenizers, refusals."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from waiting import limit

from tasks.config.evaluation import EvaluationConfig, suite_metrics
from tasks.evaluation import scores
from tasks.formats.mmididx import TokenWriter
from tasks.jobs import evaluate
from tasks.jobs.evaluation.heldout import Encoded, encode_for, read_heldout
from tasks.jobs.evaluation.scoring import batches as in_batches
from tasks.jobs.evaluation.scoring import ends, load_model, score, windows
from tasks.jobs.node.runtime import Rank

EOD = "<|endoftext|>"
WORDS = [
    "def",
    "return",
    "self",
    "größe",
    "for",
    "in",
    "range",
    "x",
    "y",
    "日本",
    "import",
    "None",
    "==",
    "->",
    "\n    ",
]
SEQUENCE = 32


def texts(count, *, longest, seed):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(1, longest))) for _ in range(count)]


HELDOUT = [*texts(11, longest=12, seed=1), texts(1, longest=400, seed=2)[0] * 3, f"text with {EOD} inside"]


def byte_level(vocab_size, *, lowercase=False):
    """A byte-level BPE tokenizer trained on the test's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(300, longest=30, seed=0), trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOD).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))  # transformers drops the post-processor


def with_opening(tokenizer, token=EOD):
    """The same tokenizer, with a post-processor that puts a token before each document, as Llama 3's does."""
    made = Tokenizer.from_str(tokenizer.to_str())
    number = made.token_to_id(token)
    made.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
    return made


def save_tokens(folder, tokenizer, heldout):
    eod_id, vocab_size = tokenizer.token_to_id(EOD), tokenizer.get_vocab_size()
    save_tokenizer(tokenizer, folder / "tokenizer")
    for split, documents in {"train": texts(300, longest=30, seed=0), "heldout": heldout}.items():
        writer = TokenWriter(folder / f"{split}_text_document", vocab_size)
        for text in documents:
            writer.add_document([*tokenizer.encode(text).ids, eod_id])
        writer.close()
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": vocab_size, "eod_id": eod_id}))


def save_checkpoint(folder, tokenizer, *, weights=None):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    if weights is not None:
        model.lm_head.weight.data.fill_(weights)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(300)


@pytest.fixture(scope="module")
def tokens(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    save_tokens(folder, tokenizer, HELDOUT)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, tokenizer)
    return folder


def job(folder, tokens, checkpoint, **evaluation):
    settings = {
        "evaluation": EvaluationConfig(**evaluation).model_dump(mode="json"),
        "sequence_length": SEQUENCE,
        "threads": 1,
    }
    inputs = {"tokens": str(tokens), "checkpoint": str(checkpoint)}
    (folder / "config.json").write_text(
        json.dumps({"program": "tasks.jobs.evaluate", "settings": settings, "inputs": inputs})
    )
    (folder / "out").mkdir()
    return Rank(
        folder=folder,
        rank=0,
        world_size=1,
        attempt=1,
        settings=settings,
        inputs={name: Path(path) for name, path in inputs.items()},
        output=folder / "out",
    )


def outputs(folder):
    return [json.loads((folder / "out" / name).read_text()) for name in ("evaluation.json", "documents.json")]


def without_seconds(result):
    return {name: value for name, value in result["metrics"].items() if not name.endswith(".seconds")}


@torch.inference_mode()
def naive_bits(model, ids, eod_id, *, position, start=0):
    """Bits of one token, given the tokens from `start` on and eod before the document: one forward pass a token."""
    context = [eod_id, *ids][start : position + 1]
    logits = model(input_ids=torch.tensor([context])).logits[0, -1].double()
    return -torch.log_softmax(logits, dim=0)[ids[position]].item() / math.log(2)


def test_short_documents_equal_a_loop_over_tokens(tokenizer, tokens, checkpoint, tmp_path):
    rank = job(tmp_path, tokens, checkpoint)
    heldout = read_heldout(tokens, EvaluationConfig())
    bits = score(load_model(checkpoint), heldout.encoded, context=SEQUENCE, rank=rank).bits
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    eod_id = tokenizer.token_to_id(EOD)
    short = [number for number, text in enumerate(HELDOUT) if len(text) < 60]
    assert len(short) > 5
    for number in short:
        ids = [*tokenizer.encode(HELDOUT[number]).ids, eod_id]
        assert len(ids) <= SEQUENCE
        expected = sum(naive_bits(model, ids, eod_id, position=place) for place in range(len(ids)))
        assert bits[number] == pytest.approx(expected, rel=1e-5)


@torch.inference_mode()
def test_accuracy_and_certainty_equal_a_loop_over_tokens(tokenizer, tokens, checkpoint, tmp_path):
    model, eod_id = load_model(checkpoint), tokenizer.token_to_id(EOD)
    ids = tokenizer.encode(HELDOUT[0]).ids[:6]
    for _ in range(8):  # what the model itself holds for the likeliest is right
        ids.append(int(model(input_ids=torch.tensor([[eod_id, *ids]])).logits[0, -1].argmax()))
    short = Encoded([np.array(ids), np.array([*ids[:5], *ids[8:], eod_id])], eod_id)
    scored = score(model, short, context=SEQUENCE, rank=job(tmp_path, tokens, checkpoint))
    for row, ids in enumerate(short.documents):
        read = torch.tensor([[short.eod_id, *ids[:-1]]])
        sure, guess = torch.softmax(model(input_ids=read).logits[0].double(), dim=-1).max(dim=-1)
        right = guess.numpy() == ids
        assert scored.correct[row] == right.sum() and scored.tokens[row] == len(ids)
        bins = np.minimum((sure.numpy() * 15).astype(int), 14)
        for place in range(15):
            there = bins == place
            wanted = [there.sum(), sure.numpy()[there].sum(), right[there].sum()]
            assert scored.certainty[row, place] == pytest.approx(wanted, rel=1e-4)
    assert 8 <= scored.correct[0] < scored.tokens[0]


def test_long_documents_equal_a_loop_over_tokens_with_the_windows_context(tokens, checkpoint, tmp_path):
    rank = job(tmp_path, tokens, checkpoint)
    heldout = read_heldout(tokens, EvaluationConfig())
    number = int(heldout.encoded.lengths.argmax())
    document, eod_id = heldout.encoded.documents[number][:150], heldout.encoded.eod_id
    long = Encoded([document, document[:40]], eod_id)
    bits = score(load_model(checkpoint), long, context=SEQUENCE, rank=rank).bits
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = sum(
        naive_bits(model, document.tolist(), eod_id, position=place, start=window.start)
        for window in windows([len(document)], SEQUENCE)
        for place in range(window.scored_from, window.end)
    )
    assert bits[0] == pytest.approx(expected, rel=1e-5)


def test_bits_by_position_equal_a_loop_over_tokens(tokens, checkpoint, tmp_path):
    rank, eod_id = job(tmp_path, tokens, checkpoint), 0
    document = read_heldout(tokens, EvaluationConfig()).encoded.documents[0].tolist()
    long = (document * 20)[:70]
    model, encoded = load_model(checkpoint), Encoded([np.array(document), np.array(long)], eod_id)
    found = score(model, encoded, context=SEQUENCE, rank=rank).positions
    assert ends(SEQUENCE) == [16, 24, 32] and ends(300) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 300]
    bits, counts = np.zeros(SEQUENCE + 1), np.zeros(SEQUENCE + 1)
    for window in windows([70], SEQUENCE):
        for place in range(window.scored_from, window.end):
            bits[place - window.start + 1] += naive_bits(model, long, eod_id, position=place, start=window.start)
            counts[place - window.start + 1] += 1
    for bucket, (first, last) in enumerate([(1, 16), (17, 24), (25, 32)]):
        assert found.tokens[1, bucket] == counts[first : last + 1].sum()
        assert found.bits[1, bucket] == pytest.approx(bits[first : last + 1].sum(), rel=1e-5)
    assert found.tokens[0].tolist() == [len(document), 0, 0] and len(document) <= 16


def trained(checkpoint, folder, **told):
    copy = Path(shutil.copytree(checkpoint, folder))
    (copy / "training.json").write_text(json.dumps(told))
    return copy


def test_positions_that_no_document_reaches_are_measured_on_joined_ones(tokenizer, checkpoint, tmp_path):
    short = [text for text in HELDOUT if len(text) < 60]
    save_tokens(tmp_path / "short", tokenizer, short)
    measured = trained(checkpoint, tmp_path / "trained", sequence_length=SEQUENCE)
    metrics = evaluate.run(job(tmp_path, tmp_path / "short", measured, probe_samples=0, min_documents=1))["metrics"]
    evaluation, _ = outputs(tmp_path)
    lengths = [len(tokenizer.encode(text).ids) + 1 for text in short]
    assert max(lengths) < SEQUENCE < sum(lengths)
    assert evaluation["context"] == {"declared": SEQUENCE, "measured": SEQUENCE} and metrics["context"] == SEQUENCE
    first, *_, last = evaluation["positions"]
    assert (first["from"], first["joined"], last["to"], last["joined"]) == (1, False, SEQUENCE, True)
    assert first["tokens"] == sum(min(length, 16) for length in lengths)
    rows = sum(lengths) // SEQUENCE
    assert last["tokens"] == 8 * rows and last["documents"] == rows and last["bits_per_token"] > 0


def test_a_context_that_was_not_measured_is_not_declared_unless_the_model_came_with_it(tokenizer, checkpoint, tmp_path):
    save_tokens(tmp_path / "few", tokenizer, ["x", "y"])
    said = {}
    for name, told in (
        ("trained", {"sequence_length": SEQUENCE}),
        ("tuned", {"sequence_length": 4, "context": SEQUENCE}),
    ):
        (tmp_path / name).mkdir()
        measured = trained(checkpoint, tmp_path / f"{name}-checkpoint", **told)
        evaluate.run(job(tmp_path / name, tmp_path / "few", measured, probe_samples=0, min_documents=1))
        said[name] = outputs(tmp_path / name)[0]
    count = 1 + len(tokenizer.encode("x").ids)
    assert said["trained"]["context"] == {"declared": count, "measured": count}
    assert said["tuned"]["context"] == {"declared": SEQUENCE, "measured": 4}
    assert said["tuned"]["positions"][-1]["bits_per_token"] is None


@pytest.mark.parametrize("sequence_length", [1, 2, 5, 32, 33])
def test_windows_score_every_position_once_with_half_a_window_of_context(sequence_length):
    lengths = [1, 2, 4, 5, 6, 31, 32, 33, 47, 48, 49, 500]
    scored = [np.zeros(length, dtype=int) for length in lengths]
    for window in windows(lengths, sequence_length):
        assert 0 <= window.start <= window.scored_from < window.end
        assert window.length == min(sequence_length, lengths[window.document])
        assert window.scored_from == 0 or window.scored_from - window.start >= sequence_length // 2
        scored[window.document][window.scored_from : window.end] += 1
    assert all((counts == 1).all() for counts in scored)


def test_batches_keep_every_window_and_the_limit():
    found = windows([3, 500, 40, 7, 7, 7, 900], 64)
    batches = list(in_batches(found, 200))
    assert sorted(map(repr, (window for batch in batches for window in batch))) == sorted(map(repr, found))
    assert all(len(batch) * max(window.length for window in batch) <= 200 for batch in batches)
    assert len(batches) < len(found)
    assert all(len(batch) == 1 for batch in in_batches(found, 1))


def test_files_hold_the_text_the_bits_and_what_follows_from_them(tokenizer, tokens, checkpoint, tmp_path):
    metrics = evaluate.run(job(tmp_path, tokens, checkpoint))["metrics"]
    evaluation, documents = outputs(tmp_path)
    assert documents["bytes"] == [len(text.encode()) for text in HELDOUT]
    assert {len(column) for column in documents.values()} == {len(HELDOUT)}
    sampling = {"samples": 1000, "confidence": 0.95, "seed": 1234}
    score = scores.bits_per_byte_interval(documents["model_bits"], documents["bytes"], **sampling)
    gain = scores.relative_gain(documents["model_bits"], documents["bigram_bits"], **sampling)
    assert evaluation["bits_per_byte"] == metrics["bits_per_byte"] == score.estimate
    assert evaluation["interval"] == [score.low, score.high]
    assert evaluation["gain_over_bigram"] == {"estimate": gain.estimate, "interval": [gain.low, gain.high]}
    assert (metrics["gain_low"], metrics["gain_high"]) == (gain.low, gain.high)
    assert evaluation["tokens"] == sum(len(tokenizer.encode(text).ids) + 1 for text in HELDOUT)
    assert math.log2(evaluation["perplexity"]) * evaluation["tokens"] == pytest.approx(sum(documents["model_bits"]))
    assert metrics["bigram_bits_per_byte"] < metrics["unigram_bits_per_byte"] < metrics["bits_per_byte"]
    assert json.loads((tmp_path / "progress.json").read_text())["total"] > 0
    assert evaluation["accuracy"]["estimate"] == sum(documents["correct"]) / sum(documents["tokens"])
    assert evaluation["calibration"]["error"] == metrics["calibration_error"]
    assert sum(each["tokens"] for each in evaluation["calibration"]["bins"]) == evaluation["tokens"]
    assert set(evaluation["suites"]) == {"memorisation", "leakage"} and metrics["memorisation.seconds"] > 0
    known = suite_metrics(EvaluationConfig())
    assert set(known) == set(evaluate.SUITES)
    for suite, result in evaluation["suites"].items():
        assert set(result["metrics"]) <= set(known[suite][1])  # what a configuration's rules are held against


def test_slices_hold_every_document_once_and_few_documents_have_no_interval(tokens, checkpoint, tmp_path):
    evaluate.run(job(tmp_path, tokens, checkpoint, min_slice_documents=4, probe_samples=0))
    evaluation, documents = outputs(tmp_path)
    lengths = [row for row in evaluation["slices"] if row["slice"].startswith("length")]
    assert sum(row["documents"] for row in lengths) == len(HELDOUT)
    assert sum(row["bytes"] for row in lengths) == sum(documents["bytes"])
    bits = sum(row["bits_per_byte"] * row["bytes"] for row in lengths)
    assert bits == pytest.approx(sum(documents["model_bits"]))
    for row in evaluation["slices"]:
        enough = row["documents"] >= 4
        assert row["status"] == ("measured" if enough else "insufficient")
        assert (row["interval"] is not None) == enough == (row["accuracy"]["interval"] is not None)
    assert {row["status"] for row in lengths} == {"measured", "insufficient"}
    assert evaluation["suites"] == {} and not (tmp_path / "out" / "sources.json").exists()


def test_each_corpus_of_a_mixture_is_a_slice(tokenizer, tokens, checkpoint, tmp_path):
    other = texts(4, longest=20, seed=9)  # fewer than a verdict needs
    save_tokens(tmp_path / "other", tokenizer, other)
    rank = job(tmp_path, tokens, checkpoint, probe_samples=0)
    rank.settings["source"] = "own"
    save_tokens(tmp_path / "none", tokenizer, [])
    more = {"tokens-wiki": tmp_path / "other", "tokens-none": tmp_path / "none"}
    evaluate.run(replace(rank, inputs={**rank.inputs, **more}))
    evaluation, documents = outputs(tmp_path)
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    own, wiki = evaluation["slices"][:2]
    assert (own["slice"], wiki["slice"]) == ("source own", "source wiki") and sources["own"] == "own"
    assert own["bits_per_byte"] == evaluation["bits_per_byte"] and own["documents"] == len(HELDOUT)
    assert sources["others"]["wiki"]["bytes"] == [len(text.encode()) for text in other] and wiki["documents"] == 4
    assert documents["bytes"] == [len(text.encode()) for text in HELDOUT]


def test_the_program_writes_the_same_bytes_again(tokens, checkpoint, tmp_path):
    folders = [tmp_path / "here", tmp_path / "launched"]
    for folder in folders:
        folder.mkdir()
        rank = job(folder, tokens, checkpoint)
    expected = evaluate.run(Rank(**{**vars(rank), "folder": folders[0], "output": folders[0] / "out"}))
    done = subprocess.run(
        [sys.executable, "-m", "tasks.jobs.evaluate"],
        env={**os.environ, "HEADWAY_JOB": str(folders[1]), "OMP_NUM_THREADS": "1"},
        timeout=limit(120),
    )
    assert done.returncode == 0, (folders[1] / "logs/rank-0.log").read_text()
    result = json.loads((folders[1] / "result.json").read_text())
    assert [without_seconds(each) for each in (result, expected)] == [without_seconds(expected)] * 2
    for name in ("evaluation.json", "documents.json", "openings.json"):
        assert (folders[0] / "out" / name).read_bytes() == (folders[1] / "out" / name).read_bytes()


def test_another_tokenizer_is_measured_on_the_same_text(tokens, checkpoint, tmp_path):
    other = byte_level(350)
    save_checkpoint(tmp_path / "other", other)
    folders = [tmp_path / "own", tmp_path / "foreign"]
    for folder, measured in zip(folders, (checkpoint, tmp_path / "other"), strict=True):
        folder.mkdir()
        evaluate.run(job(folder, tokens, measured))
    (own, own_documents), (foreign, foreign_documents) = map(outputs, folders)
    for column in ("bytes", "bigram_bits", "unigram_bits"):
        assert own_documents[column] == foreign_documents[column]
    assert foreign["tokens"] == sum(len(other.encode(text).ids) + 1 for text in HELDOUT) < own["tokens"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    ids = [*other.encode(HELDOUT[0]).ids, other.token_to_id(EOD)]
    expected = sum(naive_bits(model, ids, ids[-1], position=place) for place in range(len(ids)))
    assert foreign_documents["model_bits"][0] == pytest.approx(expected, rel=1e-5)


def test_a_tokenizer_that_loses_text_is_refused(tokenizer, tmp_path):
    save_tokens(tmp_path / "tokens", tokenizer, ["Upper And Lower"] * 6)
    save_checkpoint(tmp_path / "lossy", byte_level(280, lowercase=True))
    heldout = read_heldout(tmp_path / "tokens", EvaluationConfig())
    with pytest.raises(ValueError, match="does not give back held-out document 0"):
        encode_for(tmp_path / "lossy", tmp_path / "tokens", heldout)


def test_what_does_not_fit_into_max_bytes_is_left_out_whole(tokens):
    whole = read_heldout(tokens, EvaluationConfig())
    assert (whole.texts, whole.share) == (HELDOUT, 1.0)
    sizes = [len(text.encode()) for text in HELDOUT]
    limit = sum(sizes) - 1
    part = read_heldout(tokens, EvaluationConfig(max_bytes=limit))
    assert [text for text in HELDOUT if text in part.texts] == part.texts and part.byte_counts.sum() <= limit
    assert len(HELDOUT) - 4 < len(part.texts) < len(HELDOUT) == part.available and part.share < 1


def test_too_few_documents_name_both_numbers_and_the_remedy(tokens):
    with pytest.raises(ValueError, match=r"13 held-out .*min_documents = 50: raise preprocessing.heldout_fraction"):
        read_heldout(tokens, EvaluationConfig(min_documents=50))
    with pytest.raises(ValueError, match=r"^0 held-out .*min_documents = 5: raise evaluation.max_bytes, which is 1"):
        read_heldout(tokens, EvaluationConfig(max_bytes=1))


def test_weights_that_are_not_finite_end_the_job(tokenizer, tokens, tmp_path):
    save_checkpoint(tmp_path / "broken", tokenizer, weights=float("nan"))
    with pytest.raises(ValueError, match="no finite probability to 13 of 13 held-out documents"):
        evaluate.run(job(tmp_path, tokens, tmp_path / "broken"))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_opening_token_has_no_bytes_and_no_bits(tokenizer, tokens, checkpoint, tmp_path):
    """The same network on the same text, by a tokenizer that puts a token before each document and by one that does not."""
    opening = with_opening(tokenizer)
    save_tokens(tmp_path / "tokens", opening, HELDOUT)
    save_checkpoint(tmp_path / "checkpoint", opening)
    found = []
    for name, of, measured in (("plain", tokens, checkpoint), ("opened", tmp_path / "tokens", tmp_path / "checkpoint")):
        (tmp_path / name).mkdir()
        evaluate.run(job(tmp_path / name, of, measured, probe_samples=0))
        found.append(outputs(tmp_path / name))
    (plain, documents), (opened, others) = found
    assert opened["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-6)
    assert others["bytes"] == documents["bytes"] == [len(text.encode()) for text in HELDOUT]
    assert (others["hashes"], others["tokens"]) == (documents["hashes"], documents["tokens"])


def test_each_tokenizer_gives_its_own_opening_as_context(tokenizer, tokens, tmp_path):
    """Also one of several tokens, and in windows: what stands before the document is read by the first window alone."""
    opening = Tokenizer.from_str(tokenizer.to_str())
    first = [("q", opening.token_to_id("q")), ("z", opening.token_to_id("z"))]
    opening.post_processor = processors.TemplateProcessing(single="q z $A", special_tokens=first)
    save_checkpoint(tmp_path / "checkpoint", opening)
    heldout = read_heldout(tokens, EvaluationConfig())
    encoded = encode_for(tmp_path / "checkpoint", tokens, heldout)
    before = [number for _, number in first]
    assert encoded.context == tuple(before) and heldout.encoded.context == (heldout.encoded.eod_id,)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    bits = score(
        load_model(tmp_path / "checkpoint"), encoded, context=SEQUENCE, rank=job(tmp_path, tokens, tokens)
    ).bits
    short = [place for place, length in enumerate(encoded.lengths) if length < SEQUENCE - 1]
    assert len(short) > 5
    for place in short:
        ids = encoded.documents[place].tolist()
        expected = sum(naive_bits(model, [before[1], *ids], before[0], position=n + 1) for n in range(len(ids)))
        assert bits[place] == pytest.approx(expected, rel=1e-5)
    longest = int(encoded.lengths.argmax())
    assert encoded.lengths[longest] > 3 * SEQUENCE
    told = [before[1], *encoded.documents[longest].tolist()]
    expected = sum(
        naive_bits(model, told, before[0], position=place, start=window.start)
        for window in windows([len(told)], SEQUENCE)
        for place in range(max(window.scored_from, 1), window.end)
    )
    assert bits[longest] == pytest.approx(expected, rel=1e-5)


def test_of_a_split_that_is_too_long_every_language_is_measured(tokenizer, tmp_path):
    """First one language, then another, and early a document that fits nowhere: the head of the file would be one language."""
    english, russian = (
        [f"the text number {n} of many" for n in range(900)],
        [f"текст номер {n} из многих" for n in range(900)],
    )
    save_tokens(tmp_path / "tokens", tokenizer, [english[0], "x" * 30_000, *english[1:], *russian])
    config = EvaluationConfig(max_bytes=20_000)
    heldout = read_heldout(tmp_path / "tokens", config)
    shares = [sum(text in set(part) for text in heldout.texts) / len(part) for part in (english, russian)]
    assert shares[0] == pytest.approx(shares[1], rel=0.2) and 0.2 < shares[0] < 0.6
    assert 0.99 * 20_000 <= heldout.byte_counts.sum() <= 20_000
    assert (heldout.available, len(heldout.texts)) == (1801, len(heldout.encoded.documents))
    assert 0 < heldout.share < 0.5
    again = read_heldout(tmp_path / "tokens", config)
    assert again.texts == heldout.texts
    order = {text: place for place, text in enumerate([*english, *russian])}
    assert sorted(heldout.texts, key=order.__getitem__) == heldout.texts
