"""Conversations: three forms become one, and what breaks a rule is named by its turn."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config.data import ValidationConfig
from tasks.data.corpus import conversations
from tasks.data.corpus.inputs import cut, find_shards
from tasks.data.corpus.reading import read_unit

pytestmark = pytest.mark.unit

USER, ANSWER = {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Three."}
SYSTEM = {"role": "system", "content": "Count."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}], "content": None}
RESULT = {"role": "tool", "content": "2"}


def kept(record):
    return json.loads(conversations.read(record)[1])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [SYSTEM, USER, ANSWER]},
        {
            "messages": [
                {**SYSTEM, "role": "developer"},
                {**USER, "content": [{"type": "text", "text": "Two?"}]},
                ANSWER,
            ]
        },
        {
            "conversations": [
                {"from": "system", "value": "Count."},
                {"from": "human", "value": "Two?"},
                {"from": "gpt", "value": "Three."},
            ]
        },
        {
            "system": "Count.",
            "conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Three."}],
        },
        {"system": "Count.", "instruction": "Two?", "input": "", "output": "Three."},
    ],
)
def test_every_form_becomes_messages(record):
    assert kept(record) == {"messages": [SYSTEM, USER, ANSWER]}
    assert conversations.read(record)[0] == "Count.\n\nTwo?\n\nThree."


def test_alpaca_has_an_input_and_a_history():
    record = {"instruction": "Add.", "input": "1 1", "output": "2", "history": [["Hi", "Hello"]]}
    assert [message["content"] for message in kept(record)["messages"]] == ["Hi", "Hello", "Add.\n1 1", "2"]


def test_tools_and_their_calls_are_kept_as_templates_read_them():
    tools = [{"type": "function", "function": {"name": "add"}}]
    conversation = kept({"messages": [USER, CALL, RESULT, ANSWER], "tools": json.dumps(tools)})
    assert conversation["tools"] == tools
    assert conversation["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    text, _ = conversations.read({"messages": [USER, CALL, RESULT, ANSWER]})
    assert '"a": 1' in text  # so that a secret in a call is found


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER, SYSTEM, ANSWER], r"turn 2 \(system\): a system prompt comes first, and once; put it first"),
        ([SYSTEM, SYSTEM, USER, ANSWER], r"turn 2 \(system\): a system prompt comes first, and once"),
        ([USER, USER, ANSWER], r"turn 2 \(user\): after the turn of user comes assistant; put the turns in order"),
        ([ANSWER], r"turn 1 \(assistant\): at the beginning comes system or user"),
        ([USER, ANSWER, RESULT], r"turn 3 \(tool\): after the turn of assistant comes user"),
        ([USER, CALL, USER], r"turn 3 \(user\): after the turn of assistant comes tool"),
        ([USER, ANSWER, USER], r"turn 3 \(user\): a conversation ends with the assistant's answer; cut"),
        ([USER, {**ANSWER, "content": " \n"}], r"turn 2 \(assistant\): it is empty; fill it in"),
        ([{**USER, "role": "usr"}, ANSWER], "turn 1 has the role 'usr', and no such role is known; use system, user"),
        ([{"content": "Two?"}, ANSWER], "turn 1 has the role None"),
        (
            [{**USER, "tool_calls": CALL["tool_calls"]}, ANSWER],
            r"turn 1 \(user\): only the assistant calls tools; move",
        ),
        (
            [{**USER, "content": [{"type": "image_url"}]}, ANSWER],
            r"turn 1 \(user\): its content has parts that are no text",
        ),
        ([{**USER, "content": 2}, ANSWER], r"turn 1 \(user\): its content is a number, and should be text"),
        (
            [USER, {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}],
            "turn 2 calls add with .* no JSON",
        ),
        (["Two?"], "turn 1 is text, and should be an object with role and content"),
        ([], "the conversation has no turns; leave the record out"),
        ("Two?", "messages is text, and should be a list of turns"),
    ],
)
def test_what_breaks_a_rule_is_named_by_turn_with_the_remedy(messages, said):
    with pytest.raises(ValueError, match=said):
        conversations.read({"messages": messages})


def test_a_record_of_no_form_says_what_it_has():
    with pytest.raises(ValueError, match=r"no conversation in this record \(it has: text\); give messages"):
        conversations.read({"text": "Two?"})


def test_lines_around_a_broken_conversation_are_read(tmp_path):
    records = [{"messages": [USER, ANSWER]}, {"messages": [USER]}, {"instruction": "Two?", "output": "Three."}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "{\n")
    (batch,) = read_unit(cut(find_shards([tmp_path]))[0], ("messages",))
    assert batch.lines == [1, 3] and batch.texts == ["Two?\n\nThree."] * 2
    assert len(set(batch.columns[conversations.CONVERSATION])) == 1
    assert [bad.line for bad in batch.bad] == [2, 4] and "not a JSON line" in batch.bad[1].reason


def test_columns_of_parquet_are_conversations_too(tmp_path):
    rows = [[USER, ANSWER], [USER, {**USER, "content": "No."}]]
    pq.write_table(pa.table({"messages": rows, "id": [1, 2]}), tmp_path / "chats.parquet")
    (batch,) = read_unit(cut(find_shards([tmp_path]))[0], ("messages",))
    assert batch.lines == [1] and batch.texts == ["Two?\n\nThree."] and batch.bad[0].line == 2
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "chats.parquet")
    with pytest.raises(ValueError, match="no column 'messages'"):
        list(read_unit(cut(find_shards([tmp_path]))[0], ("messages",)))


def test_the_longest_turn_is_known():
    _, conversation = conversations.read({"messages": [SYSTEM, USER, {**ANSWER, "content": "x" * 9}]})
    assert conversations.longest_turn(conversation) == (9, 3, "assistant")
    with pytest.raises(ValueError, match="max_turn_characters 9 is about the turns of conversations"):
        ValidationConfig(max_turn_characters=9)
