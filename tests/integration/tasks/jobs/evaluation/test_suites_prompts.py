"""The suite `prompts`: what is asked, by which template, and which answers keep which rule."""

import json

import pytest
import torch
from chat_templates import CHATML
from suite_material import EOD, suite_bench, tiny_measured

from tasks.config.evaluation import EvaluationConfig
from tasks.formats.chat_template import ChatTemplate
from tasks.jobs.evaluation import prompts as suite
from tasks.jobs.evaluation.generating import begin
from tasks.jobs.evaluation.prompts import judge_of, prompts, read_prompts
from tasks.jobs.evaluation.suites import run_suites

SCHEMA = {
    "type": "object",
    "properties": {"team": {"const": "billing"}, "urgent": {"type": "boolean"}},
    "required": ["team", "urgent"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    checkpoint, model = tiny_measured(tmp_path_factory.mktemp("checkpoint"))
    (checkpoint / "chat_template.jinja").write_text(CHATML)
    return checkpoint, model


def save(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def bench(folder, measured, *records, **more):
    file = {"name": "own", "file": save(folder / "own.jsonl", *records), "tokens": 12, **more}
    return suite_bench(folder, measured, prompts=[file])


def likeliest(measured, tokens, count):
    """What the model writes behind a prompt, one token after the other, each from the whole text."""
    written = []
    for _ in range(count):
        logits = measured[1](torch.tensor([[*tokens, *written]])).logits[0, -1]
        written.append(int(logits.argmax()))
    return written


def test_a_prompt_is_asked_by_the_template_and_judged_up_to_where_the_answer_ends(tmp_path, measured):
    records = [{"text": "Two?", "exact": "?"}, {"system": "Short.", "text": "Née?", "exact": "?"}]
    asked = bench(tmp_path, measured, *records)
    read = read_prompts(asked, asked.config.prompts[0])
    turns = [
        [{"role": "user", "content": "Two?"}],
        [{"role": "system", "content": "Short."}, {"role": "user", "content": "Née?"}],
    ]
    assert [each.messages for each in read] == turns
    answers = []
    for messages in turns:
        tokens = asked.tokenizer.encode(ChatTemplate(CHATML, {}).render(messages).text, add_special_tokens=False).ids
        written = likeliest(measured, tokens, 12)
        answers.append(asked.tokenizer.decode([*written, EOD][: [*written, EOD].index(EOD)]).strip())
    right = [{**record, "exact": answer or "none"} for record, answer in zip(records, answers, strict=True)]
    told, _ = run_suites(
        bench(tmp_path, measured, *right, {"text": "Two?", "exact": "something else"}), {"prompts": prompts}
    )
    assert told["prompts"]["problems"] == {"own_share": "".join("01"[bool(answer)] for answer in answers) + "0"}
    assert told["prompts"]["metrics"]["own_count"] == sum(map(bool, answers)) and told["prompts"]["samples"] == 3
    assert set(told["prompts"]["metrics"]) == {"own_count", "own_share", "own_low", "own_high"}
    assert told["prompts"]["details"]["files"]["own"] == {"samples": 3, "rules": {"exact": 3}}


def test_further_answers_are_drawn_and_one_is_enough(tmp_path, measured):
    records = [{"text": f"Number {number}?", "regex": r"[aeiou]"} for number in range(6)]
    told, _ = run_suites(bench(tmp_path, measured, *records, samples=4), {"prompts": prompts})
    metrics, problems = told["prompts"]["metrics"], told["prompts"]["problems"]
    assert metrics["own_pass_at_4"] == problems["own_pass_at_4"].count("1") / 6
    assert 0 <= metrics["own_mean_at_4"] <= metrics["own_pass_at_4"]
    again, _ = run_suites(bench(tmp_path, measured, *records, samples=4), {"prompts": prompts})
    assert again == told


def test_no_more_is_written_once_all_have_ended(tmp_path, measured):
    given = suite_bench(tmp_path, measured)
    (whole,) = begin("a", given, [[EOD, 5, 9]], 16)()
    (ended,) = begin("b", given, [[EOD, 5, 9]], 16, stops=(whole[3],))()
    assert ended == whole[: whole.index(whole[3]) + 1]
    both = begin("c", given, [[EOD, 5, 9], [EOD, 7]], 16, stops=(whole[3],))()
    assert both[0][: len(ended)] == ended


@pytest.mark.parametrize(
    ("rule", "expected", "kept", "broken"),
    [
        ("exact", "Paris", ["Paris"], ["paris", "Paris.", ""]),
        ("exact", ["yes", "Yes. "], ["yes", "Yes."], ["no"]),
        ("regex", r"\bParis\b", ["It is Paris.", "Paris"], ["Parisian", ""]),
        ("regex", r"\A\d+\Z", ["42"], ["42.", "a 42"]),
        (
            "json_schema",
            SCHEMA,
            ['{"team": "billing", "urgent": true}', '```json\n{"team": "billing", "urgent": false}\n```'],
            ['{"team": "billing"}', '{"team": "other", "urgent": true}', "billing", "[" * 9999, ""],
        ),
    ],
)
def test_what_keeps_a_rule(tmp_path, measured, rule, expected, kept, broken):
    keeps = judge_of(suite_bench(tmp_path, measured), rule, expected)
    assert all(map(keeps, kept)) and not any(map(keeps, broken))


def test_code_is_run_in_the_sandbox_with_or_without_a_fence(tmp_path, measured):
    given = suite_bench(tmp_path, measured, code={"allow_without_namespaces": True})
    keeps = judge_of(given, "examples", ">>> double(2)\n4\n>>> double(0)\n0")
    right = "def double(x):\n    return 2 * x\n"
    assert keeps(right) and keeps(f"Here you are:\n```python\n{right}```\nIt doubles.")
    assert not any(map(keeps, ("def double(x):\n    return x\n", "I cannot.", "def double(x)", "")))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "Two?"}, "line 2 has no rule: give one of exact, regex, json_schema, examples"),
        ({"text": "Two?", "exact": "2", "regex": "2"}, "line 2 has exact and regex"),
        ({"text": 2, "exact": "2"}, "line 2: `text` must be text"),
        ({"exact": "2"}, "line 2: no conversation in this record"),
        ({"messages": [{"role": "assistant", "content": "2"}], "exact": "2"}, "line 2: turn 1"),
        ({"text": " ", "exact": "2"}, r"line 2: turn 1 \(user\): it is empty"),
        ({"text": "Two?", "exact": []}, "line 2: exact must be a text"),
        ({"text": "Two?", "regex": "("}, "line 2: regex '\\(' cannot be read"),
        ({"text": "Two?", "json_schema": {"type": "thing"}}, "line 2: json_schema is no JSON schema"),
        ({"text": "Two?", "json_schema": {"$ref": "https://example.com/s"}}, "nothing is loaded"),
        ({"text": "Two?", "examples": "double(2)"}, "line 2: examples must be lines such as"),
        ({"text": "x" * 4000, "exact": "2"}, "line 2: it has .* tokens, and the model takes"),
    ],
)
def test_what_cannot_be_asked_or_judged_is_refused_with_its_line(tmp_path, measured, record, said):
    with pytest.raises(ValueError, match=said):
        prompts(bench(tmp_path, measured, {"text": "Two?", "exact": "2"}, record))


def test_a_pattern_that_does_not_end_is_told(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(suite, "SECONDS", 0.3)
    given = bench(tmp_path, measured, {"text": "Two?", "regex": r"(a+)+$"})
    records = read_prompts(given, given.config.prompts[0])
    rows = [given.tokenizer.encode("a" * 60 + "b").ids]
    with pytest.raises(ValueError, match="own.jsonl, line 1: the rule regex takes more than 0.3 seconds"):
        suite._judged(given, records, rows)


def test_a_model_without_a_template_continues_plain_text_and_takes_no_turns(tmp_path, tmp_path_factory):
    bare = tiny_measured(tmp_path_factory.mktemp("bare"))
    given = bench(tmp_path, bare, {"text": "def ", "regex": "x"})
    assert suite._asked(given, given.config.prompts[0], read_prompts(given, given.config.prompts[0])) == [
        [EOD, *given.tokenizer.encode("def ").ids]
    ]
    with pytest.raises(ValueError, match="has turns, and the model has no chat template"):
        prompts(bench(tmp_path, bare, {"system": "Short.", "text": "def ", "regex": "x"}))
    tokens = tmp_path / "tokens"
    (tokens / "tokenizer").mkdir(parents=True)
    (tokens / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    file = {
        "name": "own",
        "file": save(tmp_path / "own.jsonl", {"system": "Short.", "text": "def ", "regex": "x"}),
        "tokens": 4,
    }
    with_tokens = suite_bench(tmp_path, bare, inputs={"tokens": tokens}, prompts=[file])
    assert prompts(with_tokens).samples == 1


def test_the_answer_that_a_record_brings_is_not_shown_to_the_model(tmp_path, measured):
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]
    given = bench(tmp_path, measured, {"messages": turns, "exact": "2"})
    assert read_prompts(given, given.config.prompts[0])[0].messages == turns[:1]


def test_files_are_handed_to_the_job_once(tmp_path):
    config = EvaluationConfig(prompts=[{"file": "mine"}, {"name": "b", "file": "/a/b.jsonl"}], toxic_words="mine")
    assert config.files == ("mine",) and config.paths == ("/a/b.jsonl",)
    assert EvaluationConfig(**config.model_dump(mode="json")) == config
