"""What is served is what is measured: the tokens that open a document, stored with a model, are the same everywhere, once."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from base_material import write_tokens_of
from tiny_model import CORPUS, PROMPTS, VOCABULARY, export_tiny, make_checkpoint, make_tokenizer, start_export
from waiting import limit

from tasks.common.process import read_json
from tasks.formats.mmididx import TokenWriter
from tasks.jobs.evaluation.heldout import Encoded, encode_for, read_heldout
from tasks.jobs.evaluation.scoring import load_model, score
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.model_process import ProcessRuntime
from tasks.jobs.serving.runtime import Ask, Ending
from tasks.storage.manifest import describe

END = 0


def make_opened(folder):
    """As Llama 3: the tokenizer itself puts a token before every text, and another one ends a document."""
    from tokenizers import processors

    folder.mkdir()
    make_checkpoint(folder)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="def $A", special_tokens=[("def", tokenizer.vocab["def"])]),
        ]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["end", "own"])
def checkpoint(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint")
    return make_opened(root / "own") if request.param == "own" else make_checkpoint(root)


@pytest.fixture(scope="module")
def opening(checkpoint):
    return make_tokenizer().vocab["def"] if checkpoint.name == "own" else END


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    if checkpoint.name == "own":
        assert start_export(folder / "job", checkpoint).wait(limit(180)) == 0
        made = folder / "job" / "out"
    else:
        made = export_tiny(folder)  # of the same checkpoint
    parity = read_json(made / "parity.json")
    assert parity["greedy_equal"] == parity["greedy_total"] == len(PROMPTS)
    return made


@pytest.fixture(scope="module")
def tokens(checkpoint, tmp_path_factory):
    folder = write_tokens_of(checkpoint, tmp_path_factory.mktemp("tokens") / "tokens")
    tokenizer, writer = make_tokenizer(), TokenWriter(folder / "heldout_text_document", VOCABULARY)
    before = [tokenizer.vocab["def"]] if checkpoint.name == "own" else []
    for start in range(0, 300, 30):
        writer.add_document([*before, *tokenizer(CORPUS[start : start + 90])["input_ids"], END])
    writer.close()
    return folder


def measured(checkpoint, tokens, count):
    """Bits of each of the first tokens of each document, by the evaluation."""
    from tasks.config.evaluation import EvaluationConfig

    class Silent:
        def progress(self, *_):
            pass

    heldout = read_heldout(tokens, EvaluationConfig())
    encoded = encode_for(checkpoint, tokens, heldout)
    network = load_model(checkpoint)
    sums = [
        score(
            network,
            Encoded([d[:n] for d in encoded.documents], encoded.eod_id, encoded.opening),
            context=256,
            rank=Silent(),
        ).bits
        for n in range(1, count + 1)
    ]
    return heldout.texts, np.diff([np.zeros(len(sums[0])), *sums], axis=0).T


def served(generation, text, count):
    """Bits of each of the first tokens of a text that is sent as a prompt."""
    prompt, decoder = generation.encode(text), generation.decoder
    found = []
    for place, token in enumerate(prompt[:count]):
        logits = torch.from_numpy(decoder.read(decoder.lobby, [token], before=place)[-1])
        found.append(-float(torch.log_softmax(logits, -1)[prompt[place + 1]]) / np.log(2))
    return found


def test_the_first_tokens_of_a_document_have_the_probabilities_that_were_measured(checkpoint, model, tokens):
    texts, bits = measured(checkpoint, tokens, 8)
    generation = Generation(model, 1)
    assert len(texts) == 10
    for text, expected in zip(texts, bits, strict=True):
        assert served(generation, text, 8) == pytest.approx(expected.tolist(), abs=1e-4)


def test_who_passes_the_opening_token_does_not_get_it_twice_and_it_is_counted_once(model, opening):
    word = make_tokenizer().decode([opening])
    generation = Generation(model, 1)
    assert generation.encode("import x") == [opening, *make_tokenizer()("import x")["input_ids"]]
    assert generation.encode(f"{word}import x") == generation.encode("import x")
    assert generation.encode(word) == [opening]

    async def ask(prompt):
        runtime = ProcessRuntime(files=describe(model), named="tiny")
        try:
            await runtime.start(model, threads=1)
            [ending] = [said async for said in runtime.complete(Ask(prompt, 4)) if isinstance(said, Ending)]
            return ending
        finally:
            await runtime.close()

    ending = asyncio.run(ask("import x"))
    assert ending.prompt_tokens == 1 + len(make_tokenizer()("import x")["input_ids"])


def test_other_programs_read_the_same_convention_from_the_model(model, opening):
    from gguf.vocab import SpecialVocab
    from transformers import AutoTokenizer

    text = "import x"
    assert AutoTokenizer.from_pretrained(model)(text)["input_ids"] == Generation(model, 1).encode(text)
    assert read_json(model / "genai_config.json")["model"]["bos_token_id"] == opening
    if opening == END:
        vocabulary = SpecialVocab(model)
        assert vocabulary.special_token_ids["bos"] == opening and vocabulary.add_special_token["bos"]


def test_a_model_of_an_earlier_release_is_served_as_its_golden_answers_were_made(model, opening, tmp_path):
    old = shutil.copytree(model, tmp_path / "old")
    rules = json.loads((old / "tokenizer.json").read_text()) | {"post_processor": None}
    (old / "tokenizer.json").write_text(json.dumps(rules))
    assert Generation(old, 1).encode("import x") == make_tokenizer()("import x")["input_ids"]
