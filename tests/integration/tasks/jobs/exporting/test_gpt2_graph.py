"""A GPT-2 is exported by the real program, and says what it says in PyTorch: to the token, and nearly to the bit."""

import json

import pytest
from tiny_model import CONTEXT, PROMPTS, make_gpt2, start_export
from waiting import limit


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpt2")
    checkpoint = make_gpt2(root / "checkpoint")
    assert start_export(root / "job", checkpoint).wait(limit(180)) == 0, (root / "job/logs/rank-0.log").read_text()
    return root / "job" / "out"


@pytest.mark.long
def test_the_exported_gpt2_says_what_pytorch_says(exported):
    parity = json.loads((exported / "parity.json").read_text())
    assert parity["greedy_equal"] == parity["greedy_total"] == len(PROMPTS)
    assert parity["max_logit_error"] < 1e-4
    said = [answer["tokens"] for answer in json.loads((exported / "golden.json").read_text())["prompts"]]
    assert len({tuple(tokens) for tokens in said}) > 1


@pytest.mark.long
def test_its_positions_are_an_input_and_its_context_what_it_learnt(exported):
    model = json.loads((exported / "genai_config.json").read_text())["model"]
    assert "position_ids" in model["decoder"]["inputs"]
    assert model["context_length"] == CONTEXT
    assert (exported / "tokenizer.json").is_file()
