"""Records that are conversations: three forms are read, and one is kept, `messages` as OpenAI's API has them.

A conversation that breaks a rule is no document, like a line that is no JSON: the reason names the turn and what to do. What a
model learns of it is tasks/data/tokenizing/chat.py. Pure. See docs/data.md, "Conversations".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.config.data import CONVERSATIONS

CONVERSATION = "conversation"
"""The column, beside the text, that holds each as JSON: see `read`."""
FORMS = (CONVERSATIONS, "conversations", "instruction")
"""The field that tells the form of a record: OpenAI's, ShareGPT's, Alpaca's."""
BESIDE = ("system", "tools", "input", "output", "history")
"""Other fields of those forms that are read."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""What roles are called, in these forms, and here."""
KEPT = ("reasoning_content", "tool_call_id", "name")
"""What templates read of a message beside its role, content and calls."""

Message = dict[str, Any]


def read(record: Any) -> tuple[str, str]:
    """The text of a record's conversation, by which it is judged, and the conversation itself, as JSON: messages and tools.

    Raises ValueError, naming the turn and the remedy.
    """
    if not isinstance(record, dict):
        raise ValueError(f"no conversation: {type(record).__name__} where an object should be; write one object a line")
    messages = _messages(record)
    require_turns(messages)
    conversation: dict[str, Any] = {"messages": messages}
    if tools := _listed(record.get("tools"), "tools"):
        conversation["tools"] = tools
    text = text_of(messages)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at character {error.start} is no text; give it decoded") from error
    return text, json.dumps(conversation, ensure_ascii=False)


def text_of(messages: Sequence[Message]) -> str:
    """What is said, turn after turn, with a blank line between: rules for documents are about this text."""
    return "\n\n".join(text for message in messages for text in _texts(message) if text)


def longest_turn(conversation: str) -> tuple[int, int, str]:
    """Of a conversation as JSON: characters of its longest turn, the turn's number from 1, and its role."""
    messages = json.loads(conversation)["messages"]
    size, number = max((sum(map(len, _texts(message))), -at) for at, message in enumerate(messages, start=1))
    return size, -number, messages[-number - 1]["role"]


def require_turns(messages: Sequence[Message]) -> None:
    """Raise ValueError at the first turn that is out of order or empty."""
    if not messages:
        raise ValueError("the conversation has no turns; leave the record out")
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role == "system" and number > 1:
            raise _at(
                number, role, "a system prompt comes first, and once; put it first, or make it part of a user's turn"
            )
        if not message["content"].strip() and not message.get("tool_calls"):
            raise _at(number, role, "it is empty; fill it in, or leave the record out")
        wanted = _next(before, calls=number > 1 and bool(messages[number - 2].get("tool_calls")))
        if role not in wanted:
            place = f"after the turn of {before}" if before else "at the beginning"
            raise _at(
                number,
                role,
                f"{place} comes {' or '.join(wanted)}; put the turns in order, or join those of one speaker",
            )
        before = role
    if before != "assistant":
        raise _at(
            len(messages), before, "a conversation ends with the assistant's answer; cut the turns after the last one"
        )


def _next(before: str, *, calls: bool) -> tuple[str, ...]:
    """Who may speak after a role: tools after an assistant's turn that calls them."""
    match before:
        case "":
            return ("system", "user")
        case "system":
            return ("user",)
        case "user":
            return ("assistant",)
        case "assistant":
            return ("tool",) if calls else ("user",)
        case _:
            return ("tool", "assistant")


def _at(number: int, role: str, reason: str) -> ValueError:
    return ValueError(f"turn {number} ({role}): {reason}")


def _texts(message: Message) -> tuple[str, ...]:
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ()))
    return (message.get("reasoning_content") or "", message["content"], *calls)


def _messages(record: Mapping[str, Any]) -> list[Message]:
    form = next((name for name in FORMS if record.get(name) is not None), None)
    if form is None:
        names = ", ".join(sorted(map(str, record)))[:200]
        raise ValueError(
            f"no conversation in this record (it has: {names or 'no field'}); give messages (OpenAI), conversations (ShareGPT), "
            "or instruction and output (Alpaca)"
        )
    if form == "instruction":
        return _of_alpaca(record)
    turns = record[form]
    if not isinstance(turns, list):
        raise ValueError(f"{form} is {_name_of(turns)}, and should be a list of turns; write one object a turn")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    prompt = record.get("system")
    if prompt and isinstance(prompt, str) and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": prompt})
    return messages


def _of_alpaca(record: Mapping[str, Any]) -> list[Message]:
    """Instruction and input are the user's turn, output is the answer; `history` has pairs of earlier ones."""
    pieces: dict[str, str] = {}
    for name in ("system", "instruction", "input", "output"):
        value = record.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} is {_name_of(value)}, and should be text")
        pieces[name] = value or ""
    messages = [{"role": "system", "content": pieces["system"]}] if pieces["system"] else []
    for pair in record.get("history") or ():
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise ValueError("history is no list of pairs of question and answer; give each as [question, answer]")
        messages += _question(pair[0], pair[1])
    asked = "\n".join(text for text in (pieces["instruction"], pieces["input"]) if text)
    return messages + _question(asked, pieces["output"])


def _question(asked: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _message(turn: Any, number: int) -> Message:
    """A turn of OpenAI's or of ShareGPT's form."""
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is {_name_of(turn)}, and should be an object with role and content")
    named = turn.get("role", turn.get("from"))
    role = ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise ValueError(
            f"turn {number} has the role {named!r}, and no such role is known; use system, user, assistant or tool "
            "(or ShareGPT's human and gpt)"
        )
    content = _content(turn.get("content", turn.get("value")), number, role)
    message: Message = {"role": role, "content": content}
    for name in KEPT:
        if turn.get(name) is not None:
            if not isinstance(turn[name], str):
                raise _at(number, role, f"{name} is {_name_of(turn[name])}, and should be text")
            message[name] = turn[name]
    calls = _listed(turn.get("tool_calls"), f"tool_calls of turn {number}")
    if named == "function_call":
        calls, message["content"] = _listed(f"[{content}]", f"value of turn {number}"), ""
    if calls:
        if role != "assistant":
            raise _at(number, role, "only the assistant calls tools; move tool_calls to its turn")
        message["tool_calls"] = [_call(call, number) for call in calls]
    return message


def _content(value: Any, number: int, role: str) -> str:
    """Text, or OpenAI's list of parts of which each is text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    if isinstance(value, list):
        raise _at(
            number, role, "its content has parts that are no text, and only text is learned; leave the record out"
        )
    raise _at(number, role, f"its content is {_name_of(value)}, and should be text")


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call as templates read it: name, and arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"turn {number} calls a tool without a name; give each call as a function with name and arguments"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(
                f"turn {number} calls {function['name']} with arguments that are no JSON: {error}; correct them"
            ) from error
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _listed(value: Any, name: str) -> list[Any]:
    """A list, or JSON of one: some data sets keep lists of objects as text."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} is text, and no JSON: {error}; give a list of objects") from error
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_name_of(value)}, and should be a list of objects")
    return value


def _name_of(value: Any) -> str:
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
    }
    return {**names, list: "a list", dict: "an object"}.get(type(value), type(value).__name__)
