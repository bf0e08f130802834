"""Conversations through the lifecycle: published, judged, set aside by turn, tokenized with masks, learnt, and measured."""

import json

import pytest
from conversation_material import conversations, make_chat_base
from transformers import AutoTokenizer

from flows.support.inputs import with_template
from tasks.config.data import PreprocessingConfig
from tasks.config.flows import RetrainConfig
from tasks.config.training import TrainingConfig
from tasks.serving.client import post

SETTINGS = {
    "validation.text_field": "messages",
    "validation.max_unreadable_share": 0.1,
    "preprocessing.text_field": "messages",
    "training.objective": "sft",
    "training.model": "chat",
    "training.base": "checkpoint/talker",
    "training.sequence_length": 96,
    "training.steps": 60,
    "training.warmup_steps": 1,
    "execution.heldout_every_steps": 4,
    "cluster.ranks_per_node": 2,
    "comparison.min_gain_over_bigram": -1.0,
    "deployment.endpoint": "chat",
}
BROKEN = [{"messages": [{"role": "user", "content": "Anybody?"}]}, {"text": "no conversation"}]


def settings(**more):
    return [word for name, value in {**SETTINGS, **more}.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, home):
    """The whole chain, on two ranks, of a dataset with two broken records."""
    folder = tmp_path_factory.mktemp("chats")
    records = [*conversations(60), *BROKEN]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    home.ok("checkpoint", "publish", "talker", make_chat_base(folder / "talker"))
    home.ok("dataset", "publish", "chats", folder / "chats.jsonl", "--text-field", "messages")
    return home.ok("retrain", "--dataset", "chats", "-c", "tiny", *settings())


@pytest.mark.long
def test_broken_conversations_are_set_aside_with_turn_and_remedy(ran, home):
    (quarantine,) = [ref for ref in ran.stage("validate")["outputs"] if ref.startswith("quarantine/")]
    lines = (home.folder_of(quarantine) / "files" / "quarantine.jsonl").read_text().splitlines()
    asked, other = map(json.loads, lines)
    assert (asked["line"], asked["raw"]) == (61, BROKEN[0]) and asked["rules"] == ["unreadable"]
    assert asked["detail"] == (
        "turn 1 (user): a conversation ends with the assistant's answer; cut the turns after the last one"
    )
    assert other["line"] == 62 and other["detail"].startswith(
        "no conversation in this record (it has: text); give messages"
    )


@pytest.mark.long
def test_answers_are_learnt_and_measured(ran):
    tokens, trained, measured = (ran.stage(name)["metrics"] for name in ("preprocess", "train", "evaluate"))
    assert tokens["train_documents"] + tokens["heldout_documents"] == 60
    assert 0 < tokens["train_answer_tokens"] < tokens["train_tokens"] / 2
    assert trained["conversations"] == tokens["train_documents"] and trained["conversations_left_out"] == 0
    assert 0 < measured["bits_per_byte"] < 20


@pytest.mark.long
def test_what_was_tuned_is_asked_by_chat_with_the_template_of_its_training(ran, home):
    folder = home.folder_of(ran.said["endpoint"]["model"]) / "files"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello?"}]
    asked = {"messages": messages, "max_tokens": 8}
    answer = post(f"{ran.said['endpoint']['url']}/v1/chat/completions", asked)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    with pytest.raises(ValueError, match="refused the request"):
        post(f"{ran.said['endpoint']['url']}/v1/chat/completions", {"messages": []})


def test_settings_that_do_not_fit_are_refused_before_anything_runs():
    chats = {"validation": {"text_field": "messages"}, "preprocessing": {"text_field": "messages"}}
    with pytest.raises(
        ValueError, match="training.objective pretrain and preprocessing.text_field 'messages' do not fit"
    ):
        RetrainConfig.model_validate(chats)
    with pytest.raises(ValueError, match="training.objective sft and preprocessing.text_field 'text' do not fit"):
        RetrainConfig.model_validate({"training": {"objective": "sft"}})
    with pytest.raises(ValueError, match=r"execution\.cache_gib is for pretrain"):
        RetrainConfig.model_validate({**chats, "training": {"objective": "sft"}, "execution": {"cache_gib": 1}})
    with pytest.raises(ValueError, match="with sft each conversation is a sample of its own"):
        TrainingConfig(objective="sft", mask_documents=True)
    with pytest.raises(ValueError, match=r"training\.packing is for sft"):
        TrainingConfig(packing=True)
    packed = {"objective": "sft", "packing": True, "engine": "megatron"}
    with pytest.raises(ValueError, match=r"the engine megatron has no training\.packing \(True\): leave it out"):
        RetrainConfig.model_validate({**chats, "training": packed, "execution": {"megatron": {"checkout": "/opt"}}})


def test_a_template_counts_by_its_content_and_changes_no_other_key(tmp_path):
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text("{{ messages }}")
    given = [
        PreprocessingConfig(text_field="messages", chat_template=str(tmp_path / name))
        for name in ("a.jinja", "b.jinja")
    ]
    assert with_template(given[0]) == with_template(given[1]) == with_template(with_template(given[0]))
    with pytest.raises(ValueError, match=r"c\.jinja is no file: give the path of a chat template"):
        with_template(PreprocessingConfig(text_field="messages", chat_template=str(tmp_path / "c.jinja")))
    assert "chat_template" not in PreprocessingConfig().model_dump()
    assert TrainingConfig().model_dump().keys().isdisjoint({"objective", "packing"})
