"""A model declares the context that it was measured up to; a longer one by its setting alone, which errors name."""

import json
import shutil

import pytest
from tiny_model import CONTEXT, make_checkpoint, make_gpt2, make_tokenizer, start_export
from waiting import limit

from tasks.common.process import read_json
from tasks.config.flows import RetrainConfig
from tasks.formats.model_folder import declared_context
from tasks.jobs.exporting.graph import build
from tasks.jobs.serving.generation import Generation

MEASURED = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def exported(job, checkpoint, **settings):
    """The real program, as the stage has it run: with the context of the evaluation."""
    assert start_export(job, checkpoint, measured=MEASURED, **settings).wait(limit(180)) == 0, (
        job / "logs" / "rank-0.log"
    ).read_text()
    return job / "out", read_json(job / "result.json")["metrics"]


def prompt_of(count):
    """A text of so many tokens, with the one that opens it."""
    return make_tokenizer().decode([make_tokenizer()("x")["input_ids"][0]] * (count - 1))


def test_the_endpoint_takes_what_was_measured_and_names_the_setting_for_more(checkpoint, tmp_path):
    model, metrics = exported(tmp_path / "job", checkpoint)
    settings = read_json(model / "genai_config.json")
    assert settings["model"]["context_length"] == settings["search"]["max_length"] == MEASURED < CONTEXT
    assert (
        metrics["context_length"] == MEASURED
        and "| Tokens of prompt and answer | 48 |" in (model / "README.md").read_text()
    )
    generation = Generation(model, 1)
    assert len(generation.encode(prompt_of(MEASURED - 1))) == MEASURED - 1
    with pytest.raises(ValueError, match=r"has 48 tokens; .* may have 48, .* longer export.context_length"):
        generation.encode(prompt_of(MEASURED))


def test_a_longer_context_than_config_json_declares_is_one_setting(checkpoint, tmp_path):
    model, metrics = exported(tmp_path / "job", checkpoint, context_length=2 * CONTEXT)
    assert metrics["greedy_equal"] == metrics["greedy_total"] and metrics["context_length"] == 2 * CONTEXT
    assert "512 (measured up to 48)" in (model / "README.md").read_text()
    generation = Generation(model, 1)
    said = generation.complete(generation.encode(prompt_of(CONTEXT + 40)), 8)
    assert len(said.tokens) == 8 or said.finish_reason == "stop"


def test_learnt_positions_cannot_be_lengthened_and_nothing_is_built(tmp_path):
    (tmp_path / "gpt2").mkdir()
    make_gpt2(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"export.context_length is 257, .* positions for 256 tokens"):
        build(tmp_path / "gpt2", tmp_path / "out", precision="fp32", context=CONTEXT + 1)
    assert not (tmp_path / "out").exists()


def test_a_longer_context_than_a_gpt2_is_trained_with_is_refused_with_the_settings():
    training = {"network": {"architecture": "gpt2"}, "sequence_length": 128}
    RetrainConfig(training=training, export={"context_length": 128})
    RetrainConfig(training={**training, "base": "checkpoint/x"}, export={"context_length": 256})
    with pytest.raises(ValueError, match=r"export.context_length 256 .* training.sequence_length = 128: raise that"):
        RetrainConfig(training=training, export={"context_length": 256})


@pytest.mark.parametrize(
    "told, expected",
    [
        (None, CONTEXT),  # of others
        ({"sequence_length": 64}, 64),  # trained by a release whose config.json declares four times that
        ({"sequence_length": 64, "context": 128}, 128),  # tuned from a base of 128
    ],
)
def test_a_checkpoint_declares_what_its_training_says_else_its_config(checkpoint, tmp_path, told, expected):
    folder = shutil.copytree(checkpoint, tmp_path / "c")
    if told:
        (folder / "training.json").write_text(json.dumps(told))
    assert declared_context(folder) == expected
