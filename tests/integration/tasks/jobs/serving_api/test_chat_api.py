"""Conversations: the tokenizer's chat template as Transformers renders it, and OpenAI's chat completions over it."""

import inspect
import json
import re
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from api_stand import serving
from chat_templates import CHATML, TEMPLATES
from tiny_model import make_tokenizer

from tasks.formats.chat_template import ChatTemplate
from tasks.jobs.serving.generation import Generation

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
CALLED = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
) + CHATML
CONVERSATIONS = [
    [{"role": "user", "content": "What is <b>this</b>?"}],
    [
        {"role": "system", "content": "  You answer in one word.\n"},
        {"role": "user", "content": 'Is "é" one character?'},
        {"role": "assistant", "content": " Yes. "},
        {"role": "user", "content": "And 👩‍🔬?"},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<s>"
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "<|endoftext|>"})
    for messages in CONVERSATIONS:
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
        )
        assert ours.render(messages).text == theirs


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('Only user turns') }}", "Only user turns"),
        ("{% for a in range(1000000000) %}x{% endfor %}", "Range too big"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
            "characters: shorten it",
        ),
    ],
)
def test_a_template_reads_no_file_changes_nothing_and_ends(template, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {}).render(CONVERSATIONS[0])


def test_what_is_no_template_is_refused_when_the_model_is_loaded():
    with pytest.raises(ValueError, match="the chat template cannot be read"):
        ChatTemplate("{% for %}", {})


@pytest.fixture(scope="module")
def spoken(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(CALLED)
    return folder


@pytest.fixture(scope="module")
def chat_server(spoken, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("chat-server"), spoken) as running:
        yield running


@pytest.fixture(scope="module")
def client(chat_server):
    with httpx.Client(trust_env=False) as transport:
        yield openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", http_client=transport, max_retries=0)


def test_the_openai_client_holds_a_conversation(client, chat_server, spoken):
    messages = CONVERSATIONS[0]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, seed=1)
    tokens = Generation(spoken, 1).encode_conversation(messages)
    assert tokens == make_tokenizer().encode(ChatTemplate(CHATML, {}).render(messages).text)  # nothing is put before it
    right = chat_server.complete(tokens, max_tokens=12).json()
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == right["choices"][0]["text"]
    assert (
        answer.usage.prompt_tokens == len(tokens)
        and answer.usage.completion_tokens == right["usage"]["completion_tokens"]
    )
    parts = [{"type": "text", "text": messages[0]["content"]}]
    again = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=12)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_a_conversation_is_streamed(client):
    asked = {"model": "tiny", "messages": CONVERSATIONS[1], "max_tokens": 16, "n": 2, "temperature": 1.0, "seed": 3}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {one.object for one in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [each for one in chunks for each in one.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant" and all(each.delta.role is None for each in mine[1:])
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
        likely = [token for each in mine for token in (each.logprobs.content or [])]
        assert likely == choice.logprobs.content and all(len(token.top_logprobs) == 2 for token in likely)
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_tools_their_calls_and_answers_reach_the_template(client, spoken):
    generation, turns = Generation(spoken, 1), CONVERSATIONS[0]
    asked = {"model": "tiny", "max_tokens": 2}
    with_tools = client.chat.completions.create(messages=turns, tools=TOOLS, tool_choice="auto", **asked)
    assert with_tools.usage.prompt_tokens == len(generation.encode_conversation(turns, TOOLS))
    assert not with_tools.choices[0].message.tool_calls
    without = client.chat.completions.create(messages=turns, tools=TOOLS, tool_choice="none", **asked)
    assert without.usage.prompt_tokens == len(generation.encode_conversation(turns)) < with_tools.usage.prompt_tokens
    said = [*turns, CALLING, {"role": "tool", "tool_call_id": "1", "content": "2"}]
    answer = client.chat.completions.create(messages=said, **asked)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    plain = [*turns, {"role": "assistant", "content": "", "tool_calls": calls}, said[-1]]
    assert answer.usage.prompt_tokens == len(generation.encode_conversation(plain))


@pytest.mark.parametrize("takes", [True, False])
def test_whether_a_template_takes_tools_is_read_out_of_it(takes):
    template = ChatTemplate(TEMPLATES["with tools, as Qwen 2.5"] if takes else CHATML, {})
    assert template.takes_tools is takes


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": CONVERSATIONS[0], "tools": [{"type": "function"}]}, "tools.0.function: "),
        ({"messages": CONVERSATIONS[0], "tool_choice": "required"}, "`tool_choice` is not supported"),
        ({"messages": [{**CALLING, "role": "user"}]}, "`tool_calls` are the assistant's"),
        ({"messages": CONVERSATIONS[0], "max_tokens": 0}, "`max_tokens` 0 must be above 0"),
        ({"messages": [{"role": "user", "content": "x = 1\n" * 300}]}, "shorten it"),
        ({"messages": CONVERSATIONS[0], "prompt": "a"}, "prompt: "),
    ],
)
def test_a_wrong_conversation_is_told_what_is_wrong(chat_server, body, message):
    reply = chat_server.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


DOCS = Path(__file__).parents[5] / "docs" / "api.md"
TABLE = DOCS.read_text().split("| parameter of `create` ")[1].split("\n\n")[0]
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\|$", TABLE, re.MULTILINE)
TURNS = [{"role": "user", "content": "a"}]
VALUES = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1.0},
    "logprobs": {"completions": 2, "chat": True},
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "messages": TURNS,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "tiny",
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": "perhaps",
    "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 0.5,
    "prompt": "b",
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "s",
    "seed": 3,
    "service_tier": "flex",
    "stop": ["z"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "s",
    "temperature": 0.5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
"""Of each parameter a value that asks for something."""
WITH = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
"""What else a parameter needs."""


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_every_parameter_of_the_openai_client_is_served_or_refused_as_the_page_says(client, kind):
    create = client.completions.create if kind == "completions" else client.chat.completions.create
    known = set(inspect.signature(create).parameters) - {"extra_headers", "extra_query", "extra_body", "timeout"}
    page = {name: (text if kind == "completions" else spoken) for name, text, spoken in ROWS}
    assert {name for name, word in page.items() if word} == known
    least = {"model": "tiny", "max_tokens": 2, **({"prompt": "a"} if kind == "completions" else {"messages": TURNS})}
    wrong = {}
    for name in known:
        value = VALUES[name][kind] if name == "logprobs" else VALUES[name]
        asked = {**least, **WITH.get(name, {}), name: value}
        if name == "max_completion_tokens":
            del asked["max_tokens"]
        served = page[name] in ("served", "ignored")
        try:
            answer = create(**asked)
            list(answer) if asked.get("stream") else answer.choices[0]
            wrong |= {} if served else {name: "was served"}
        except openai.BadRequestError as error:
            wrong |= {name: str(error)} if served or name not in str(error) else {}
        if page[name].startswith("`"):
            create(**{**least, name: json.loads(page[name].strip("`"))})
    assert wrong == {}


def test_a_model_without_a_template_says_where_to_ask(server):
    reply = server.client.post("/v1/chat/completions", json={"messages": CONVERSATIONS[0]})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "this model has no chat template: ask POST /v1/completions"
