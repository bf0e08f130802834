"""The suite `prompts`: the user's own prompts, each with a rule that the answer must keep, asked by the model's chat template.

Answers are the likeliest ones, and end where the model's turns end: so the same files give the same figures. With `samples`
further ones are drawn, of which one that keeps the rule is enough (pass@k, Chen et al. 2021). What becomes of each prompt is
kept as 1 or 0, by which two models are compared: tasks/evaluation/comparison.py. Answers are never published.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.common.errors import Missing
from tasks.config.evaluation import PromptFile
from tasks.data.corpus.conversations import read
from tasks.data.tokenizing.chat import time_limit
from tasks.evaluation.scores import wilson
from tasks.formats.chat_template import CHAT_TEMPLATE, SETTINGS, ChatTemplate, template_of
from tasks.jobs.evaluation.code_suite import limits_of
from tasks.jobs.evaluation.generating import begin
from tasks.jobs.evaluation.sandbox import best_limits, run_code
from tasks.jobs.evaluation.suites import Bench, Line, Suite, digest_of, files_of, lines_of, place_of

RULES = ("exact", "regex", "json_schema", "examples")
SECONDS = 10.0
"""For rendering a prompt, and for holding one answer to a rule that is no code: a pattern that takes longer never ends."""
FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""Code in an answer, as chat models mark it."""

Judge = Callable[[str], bool]
"""Whether an answer, without space around it, keeps the rule of its prompt."""


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and what its answer must keep."""

    place: str
    """File and line."""
    messages: list[dict[str, Any]]
    tools: list[Any]
    plain: bool
    """Whether it is one text, which a model without a chat template continues."""
    rule: str
    keeps: Judge


def prompts(bench: Bench) -> Suite | None:
    """The share of each file's prompts that are answered as their rule wants; `samples` is that of the shortest file."""
    if not bench.config.prompts:
        return None
    begun = []
    for file in bench.config.prompts:
        records = read_prompts(bench, file)
        asked = _asked(bench, file, records)
        name, drawn = f"prompts-{file.name}", file.samples
        likeliest = begin(name, bench, asked, file.tokens, stops=_stops(bench))
        others = begin(f"{name}-drawn", bench, asked * drawn, file.tokens, seed=bench.config.seed) if drawn else None
        begun.append((file, records, likeliest, others))
    metrics: dict[str, float] = {}
    details, digests, problems = {}, {}, {}
    for file, records, likeliest, others in begun:
        right = _judged(bench, records, likeliest())
        share = wilson(sum(right), len(right), confidence=bench.config.confidence)
        values = {"count": float(sum(right)), "share": share.estimate, "low": share.low, "high": share.high}
        problems[f"{file.name}_share"] = _bits(right)
        if others:
            kept, count = _judged(bench, records * file.samples, others()), len(records)
            passed = [any(kept[number::count]) for number in range(count)]
            name = f"pass_at_{file.samples}"
            values |= {name: sum(passed) / count, f"mean_at_{file.samples}": sum(kept) / len(kept)}
            problems[f"{file.name}_{name}"] = _bits(passed)
        metrics |= {f"{file.name}_{name}": value for name, value in values.items()}
        rules = Counter(each.rule for each in records)
        details[file.name] = {"samples": len(records), "rules": dict(sorted(rules.items()))}
        digests[file.name] = digest_of(files_of(place_of(bench, file.file, setting=_setting(file))))
    fewest = min(len(records) for _, records, *_ in begun)
    return Suite(metrics, fewest, problems=problems, details={"files": details, "sha256": digests})


def read_prompts(bench: Bench, file: PromptFile) -> list[Prompt]:
    """The prompts of a file. Raises ValueError, with the line, for one that cannot be asked or has no rule that can be kept."""
    setting = _setting(file)
    place = place_of(bench, file.file, setting=setting)
    return [prompt_of(bench, line, setting) for line in lines_of(place, setting=setting, fields=())]


def prompt_of(bench: Bench, line: Line, setting: str) -> Prompt:
    """The prompt of a record: its turns up to where the model answers, and its rule."""
    record, where = line.record, f"{setting}: {line.place}"
    named = [name for name in RULES if name in record]
    if len(named) != 1:
        count = " and ".join(named) if named else "no rule"
        raise ValueError(f"{where} has {count}: give one of {', '.join(RULES)}")
    if plain := "text" in record:
        if not isinstance(record["text"], str):
            raise ValueError(f"{where}: `text` must be text, and is {record['text']!r:.60}")
        turns: Any = [{"role": "user", "content": record["text"]}]
    else:
        turns = record.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
        turns = turns[:-1]  # an answer for people, or by which validation.benchmarks looks for the whole
    answered = [*turns, {"role": "assistant", "content": "."}] if isinstance(turns, list) else turns
    system = {"system": record["system"]} if record.get("system") else {}
    try:
        _, conversation = read({"messages": answered, "tools": record.get("tools"), **system})
        keeps = judge_of(bench, named[0], record[named[0]])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    given = json.loads(conversation)
    return Prompt(line.place, given["messages"][:-1], given.get("tools", []), plain and not system, named[0], keeps)


def judge_of(bench: Bench, rule: str, expected: Any) -> Judge:
    """What holds an answer to a rule. Raises ValueError for a rule that no answer can be held to."""
    match rule:
        case "exact":
            texts = expected if isinstance(expected, list) else [expected]
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(f"exact must be a text, or a list of them, and is {expected!r:.60}")
            allowed = {text.strip() for text in texts}
            return lambda answer: answer in allowed
        case "regex":
            if not isinstance(expected, str) or not expected:
                raise ValueError(f"regex must be a pattern of Python's re, and is {expected!r:.60}")
            try:
                pattern = re.compile(expected)
            except re.error as error:
                raise ValueError(f"regex {expected!r:.60} cannot be read: {error}") from None
            return lambda answer: bool(pattern.search(answer))
        case "json_schema":
            return _by_schema(expected)
        case _:
            return _by_examples(bench, expected)


def _by_schema(schema: Any) -> Judge:
    """The answer is JSON, with or without a fence around it, that fits a schema."""
    if importlib.util.find_spec("jsonschema") is None:
        raise Missing(
            "a prompt has the rule json_schema, and jsonschema is not installed where the model is measured",
            remedy="pip install 'headway[measure]', or write the rule as regex.",
        )
    from jsonschema import Draft202012Validator, SchemaError

    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be an object, and is {schema!r:.60}")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_schema is no JSON schema: {error.message:.200}") from None
    if outside := [ref for ref in _refs(schema) if not str(ref).startswith("#")]:
        raise ValueError(f"json_schema refers to {outside[0]!r:.60}: nothing is loaded, so write it into $defs")
    validator = Draft202012Validator(schema)

    def keeps(answer: str) -> bool:
        try:
            return validator.is_valid(json.loads(_unfenced(answer)))
        except (ValueError, RecursionError):
            return False

    return keeps


def _refs(schema: Any) -> list[Any]:
    """Every `$ref` in a schema, however deep."""
    if isinstance(schema, list):
        return [ref for each in schema for ref in _refs(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema[name] for name in ("$ref", "$dynamicRef") if name in schema]
    return own + [ref for each in schema.values() for ref in _refs(each)]


def _by_examples(bench: Bench, expected: Any) -> Judge:
    """The answer's code gives what the examples say, in the sandbox."""
    try:
        examples = doctest.DocTestParser().get_examples(expected) if isinstance(expected, str) else []
    except ValueError as error:
        raise ValueError(f"examples cannot be read: {error}") from None
    if not examples:
        raise ValueError(f"examples must be lines such as `>>> double(2)` and `4`, and is {expected!r:.60}")
    config = bench.config.code
    # Whether code can be held is asked once, before any model is.
    limits = bench.shared.get("limits of answers") or best_limits(
        limits_of(config), fall_back=config.allow_without_namespaces
    )
    bench.shared["limits of answers"] = limits

    def keeps(answer: str) -> bool:
        code = _unfenced(answer)
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return run_code(code, expected, limits) == "passed"

    return keeps


def _unfenced(answer: str) -> str:
    match = FENCED.search(answer)
    return match[1] if match else answer


def _asked(bench: Bench, file: PromptFile, records: Sequence[Prompt]) -> list[list[int]]:
    """The tokens of each prompt, up to where the answer begins."""
    template, results = _template(bench), []
    for each in records:
        where = f"{_setting(file)}: {each.place}"
        if template is None and not each.plain:
            raise ValueError(
                f"{where} has turns, and the model has no chat template: give `text` alone, or tune it on conversations"
            )
        if template:
            try:
                with time_limit(SECONDS):
                    text = template.render(each.messages, tools=each.tools).text
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        else:
            text = each.messages[-1]["content"]
        # Before a conversation stands nothing but what its template writes, before a plain text what opens a document.
        ids = [*(() if template else bench.opening), *bench.tokenizer.encode(text, add_special_tokens=False).ids]
        if not 0 < len(ids) < bench.context:
            raise ValueError(
                f"{where}: it has {len(ids)} tokens, and the model takes {bench.context} with the answer: shorten it, or leave "
                "it out"
            )
        results.append(ids)
    return results


def _template(bench: Bench) -> ChatTemplate | None:
    """The model's own chat template, else the one that the tokens were made with, as of a base that came without one."""
    folders = [bench.rank.inputs["checkpoint"]]
    folders += [bench.rank.inputs["tokens"] / "tokenizer"] if "tokens" in bench.rank.inputs else []
    for folder in folders:
        files = {name: (folder / name).read_bytes() for name in (CHAT_TEMPLATE, SETTINGS) if (folder / name).is_file()}
        if template := template_of(files):
            return template
    return None


def _stops(bench: Bench) -> tuple[int, ...]:
    """The tokens that end an answer: those of the checkpoint's own settings for generation, and the end of a document."""
    named = getattr(getattr(bench.model, "generation_config", None), "eos_token_id", None)
    own = named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys((bench.eod_id, *own)))


def _judged(bench: Bench, records: Sequence[Prompt], rows: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each answer keeps its prompt's rule. Raises SuiteTimeout; ValueError for a pattern that does not end."""
    stops, results = set(_stops(bench)), []
    for each, row in zip(records, rows, strict=True):
        bench.check_time()
        end = next((place for place, token in enumerate(row) if token in stops), len(row))
        answer = bench.tokenizer.decode(list(row[:end]), skip_special_tokens=True).strip()
        if each.rule == "examples":  # which the sandbox ends
            results.append(each.keeps(answer))
            continue
        try:
            with time_limit(SECONDS):
                results.append(each.keeps(answer))
        except TimeoutError:
            raise ValueError(
                f"{each.place}: the rule {each.rule} takes more than {SECONDS:g} seconds for an answer: write it so that it ends"
            ) from None
    return results


def _bits(right: Sequence[bool]) -> str:
    return "".join("01"[one] for one in right)


def _setting(file: PromptFile) -> str:
    return f"evaluation.prompts.{file.name}"
