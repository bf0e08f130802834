"""What vLLM's completions have beyond one plain answer: several prompts and answers, tokens, log probabilities, penalties."""

import json
import os
import shutil
import subprocess
import sys

import httpx
import numpy as np
import openai
import pytest
from api_stand import serving
from tiny_model import make_checkpoint, make_tokenizer
from waiting import limit

from tasks.jobs.serving.batch import Batch
from tasks.jobs.serving.decoder import LEAST, Choice, log_probabilities
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.runtime import Ask, Ending


@pytest.fixture(scope="module")
def generation(model):
    return Generation(model, 1)


def answers(server, prompt, **body):
    reply = server.complete(prompt, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_several_prompts_and_answers_are_each_what_they_are_alone(server):
    how = {"max_tokens": 12, "temperature": 1.2}
    alone = [
        answers(server, prompt, seed=seed, **how)["choices"][0]["text"]
        for prompt in ("def ", "class ")
        for seed in (5, 6, 7)
    ]
    together = answers(server, ["def ", "class "], n=3, seed=5, **how)
    assert [one["index"] for one in together["choices"]] == list(range(6))
    assert [one["text"] for one in together["choices"]] == alone and len(set(alone)) == 6
    single = [answers(server, prompt, **how)["usage"]["prompt_tokens"] for prompt in ("def ", "class ")]
    assert together["usage"]["prompt_tokens"] == sum(single)  # each prompt once, however many answers it got
    assert together["usage"]["completion_tokens"] == 72


def test_several_answers_are_streamed_side_by_side(server):
    asked = {"n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 200, "logprobs": 2}
    whole = answers(server, ["def ", "class "], ignore_eos=True, **asked)
    with httpx.Client(trust_env=False) as transport:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=transport, max_retries=0)
        how = {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model="tiny", prompt=["def ", "class "], stream=True, **asked, **how))
    for choice in whole["choices"]:
        mine = [each for one in chunks for each in one.choices if each.index == choice["index"]]
        assert "".join(each.text for each in mine) == choice["text"]
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for each in mine for value in getattr(each.logprobs, name)] == choice["logprobs"][name]
    assert chunks[-1].usage.model_dump(exclude_none=True).items() >= whole["usage"].items()
    order = [one.choices[0].index for one in chunks[:-1]]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)  # the second begins before the first ends


def test_a_prompt_of_tokens_is_read_as_it_is(server, generation):
    tokens = make_tokenizer().encode("class ")
    assert generation.encode("class ") == [*generation.opening, *tokens]
    opened = [*generation.opening, *tokens]
    asked, by_text = (answers(server, prompt, max_tokens=16) for prompt in (opened, "class "))
    assert asked["choices"] == by_text["choices"] and asked["usage"] == by_text["usage"]
    assert answers(server, [tokens], max_tokens=1)["usage"]["prompt_tokens"] == len(tokens)


def test_log_probabilities_are_those_of_the_graph(server, generation):
    tokens = make_tokenizer().encode("for value in values:\n    return value")
    choice = answers(server, tokens, max_tokens=6, echo=True, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    every = [*tokens, *make_tokenizer().encode(choice["text"][len(make_tokenizer().decode(tokens)) :])]
    decoder = generation.decoder
    logits = decoder.read(decoder.lobby, every, before=0).astype(np.float64)
    right = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(tokens) + 6
    for place in range(1, len(tokens)):
        assert logprobs["token_logprobs"][place] == pytest.approx(right[place - 1, every[place]], abs=1e-4)
        top = logprobs["top_logprobs"][place].values()
        assert max(top) == pytest.approx(right[place - 1].max(), abs=1e-4) and logprobs["token_logprobs"][place] in top
        least = min(np.sort(right[place - 1])[-3], logprobs["token_logprobs"][place])
        assert min(top) >= least - 1e-4 and len(top) <= 4  # halves of characters are one text
    for place in range(len(tokens), len(logprobs["tokens"])):  # greedy: the likeliest one, each time
        assert logprobs["token_logprobs"][place] == max(logprobs["top_logprobs"][place].values())
    assert choice["text"].startswith(make_tokenizer().decode(tokens))
    for place, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][place : place + len(text)] == text


def test_a_prompt_alone_is_measured_without_an_answer(server):
    whole = answers(server, "def first(", max_tokens=3, echo=True, logprobs=0)
    alone = answers(server, "def first(", max_tokens=0, echo=True, logprobs=0)
    (choice,) = alone["choices"]
    assert (choice["text"], choice["finish_reason"], alone["usage"]["completion_tokens"]) == ("def first(", "length", 0)
    count = len(choice["logprobs"]["tokens"])
    assert count == alone["usage"]["prompt_tokens"]
    assert whole["choices"][0]["logprobs"]["token_logprobs"][:count] == choice["logprobs"]["token_logprobs"]


def test_a_prompt_longer_than_a_piece_is_measured_in_pieces(server, generation):
    tokens = make_tokenizer().encode("x = 1\n" * 35)
    assert 128 < len(tokens) < 256
    logprobs = answers(server, tokens, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(tokens) and None not in logprobs["token_logprobs"][1:]
    first = answers(server, tokens[:100], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1:100] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)


def text_of(generation, **how):
    batch, tokens = Batch(generation), ()
    batch.add(0, Ask("def ", 24, **how))
    while batch.busy:
        for _, part in batch.step():
            tokens = part.tokens if isinstance(part, Ending) else tokens
    return tokens


def test_what_is_drawn_from_is_bounded(generation):
    greedy = text_of(generation)
    hot = {"temperature": 2.0, "seed": 3}
    assert text_of(generation, **hot) != greedy
    assert text_of(generation, top_k=1, **hot) == text_of(generation, min_p=1.0, **hot) == greedy
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drawn = {
        name: {Choice(Ask("", 1, temperature=1.0, seed=seed, **how)).token(logits) for seed in range(300)}
        for name, how in {"all": {}, "k": {"top_k": 2}, "p": {"min_p": 0.2}, "both": {"top_k": 3, "top_p": 0.6}}.items()
    }
    assert drawn == {"all": {0, 1, 2, 3}, "k": {0, 1}, "p": {0, 1, 2}, "both": {0, 1}}


def test_penalties_are_those_of_vllm():
    logits = np.array([2.0, 1.0, -1.0, 0.5], np.float32)

    def after(tokens, **how):
        choice = Choice(Ask("", 9, **how), prompt=[2])
        for token in tokens:
            choice._tokens.append(token)
        return choice._changed(logits).tolist()

    assert after([0, 0, 1], presence_penalty=0.5, frequency_penalty=0.25) == [1.0, 0.25, -1.0, 0.5]
    assert after([0], repetition_penalty=2.0) == [1.0, 1.0, -2.0, 0.5]
    assert after([], logit_bias=((3, 5.0),)) == [2.0, 1.0, -1.0, 5.5]
    assert logits.tolist() == [2.0, 1.0, -1.0, 0.5]


def test_biases_and_ends_do_what_they_say(server, generation):
    only = answers(server, "def ", max_tokens=5, logit_bias={"40": 100})["choices"][0]
    assert only["text"] == make_tokenizer().decode([40]) * 5
    whole = answers(server, "def ", max_tokens=24)  # this one ends by itself
    length = whole["usage"]["completion_tokens"]
    assert whole["choices"][0]["finish_reason"] == "stop" and length < 24
    later = answers(server, "def ", max_tokens=24, min_tokens=length + 2)
    assert later["usage"]["completion_tokens"] > length
    assert answers(server, "def ", max_tokens=24, ignore_eos=True)["usage"]["completion_tokens"] == 24
    tokens = text_of(generation)
    cut = answers(server, "def ", max_tokens=24, stop_token_ids=[tokens[2]])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == tokens.index(tokens[2]) + 1
    assert cut["choices"][0]["text"] == generation.text.decode(tokens[: tokens.index(tokens[2])])


def test_probabilities_of_all_tokens_sum_to_one_and_have_no_infinity():
    logits = np.array([1.0, 2.0, -np.inf, 3.0], np.float32)
    value, top = log_probabilities(logits, 2, 2)
    assert value == LEAST and [token for token, _ in top] == [3, 1, 2]
    _, every = log_probabilities(logits, 0, 4)
    assert sum(np.exp(likely) for _, likely in every) == pytest.approx(1.0)
    assert log_probabilities(logits, 1, 0)[1] == [(1, log_probabilities(logits, 1, 4)[0])]


def test_the_served_model_is_found_by_its_names(server):
    for name in ("model/tiny", "tiny"):
        assert server.client.get(f"/v1/models/{name}").json()["id"] == "model/tiny"
    other = server.client.get("/v1/models/other")
    assert other.status_code == 404 and "this is model/tiny" in other.json()["error"]["message"]


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
metadata: {{version: 1}}
"""
CHOICES = """doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]"""
GENERATES = """doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean}]"""


TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}# {% endif %}"


def test_the_harness_measures_the_endpoint_as_it_measures_the_model_itself(model, tmp_path):
    """lm-eval's `local-completions` and `local-chat-completions` beside its `hf`, on the same weights, all with their defaults:
    each choice's log likelihood, and what is generated after a text and after a conversation."""
    pytest.importorskip("lm_eval")
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    spoken = shutil.copytree(model, tmp_path / "model")
    for folder in (checkpoint, spoken):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(tmp_path / "server", spoken) as running:
        _compare_by_harness(running, checkpoint, tmp_path)


def _compare_by_harness(server, checkpoint, tmp_path):
    rows = [
        {"question": f"def f{n}(", "choices": ["values", " return self", f"x{n}", "import"], "answer": n % 4}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, more in (("picks", "multiple_choice", CHOICES), ("writes", "generate_until", GENERATES)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, folder=tmp_path, more=more))
    api = f"model=tiny,base_url={server.url}/v1"
    talks = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 2, "system_instruction": "a = 1"}
    models = {
        "hf": ("hf", f"pretrained={checkpoint},dtype=float32", ["picks", "writes"], {}),
        "completions": ("local-completions", f"{api}/completions,tokenizer={checkpoint}", ["picks", "writes"], {}),
        "hf, talking": ("hf", f"pretrained={checkpoint},dtype=float32", ["writes"], talks),
        "chat": ("local-chat-completions", f"{api}/chat/completions", ["writes"], talks),
    }
    code = f"""# fork: jobs
import json, lm_eval
from lm_eval.tasks import TaskManager
tasks = TaskManager(include_path={str(tmp_path)!r}, include_defaults=False)
measured = {{}}
for name, (kind, arguments, wanted, how) in {models!r}.items():
    results = lm_eval.simple_evaluate(kind, model_args=arguments, tasks=wanted, task_manager=tasks, device="cpu", **how)
    samples = {{task: sorted(rows, key=lambda one: one["doc_id"]) for task, rows in results["samples"].items()}}
    measured[name] = {{task: [one["resps"] for one in rows] for task, rows in samples.items()}}
    measured[name]["results"] = {{task: results["results"][task] for task in wanted}}
json.dump(measured, open({str(tmp_path / "found.json")!r}, "w"))
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "no_proxy": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit(240),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    measured = json.loads((tmp_path / "found.json").read_text())
    assert measured["chat"] == measured["hf, talking"]
    assert (
        measured["chat"]["writes"] != measured["hf"]["writes"]
        and len({str(one) for one in measured["chat"]["writes"]}) > 1
    )
    ours, theirs = measured["completions"], measured["hf"]
    assert ours["writes"] == theirs["writes"]
    for mine, other in zip(ours["picks"], theirs["picks"], strict=True):
        for (likely, greedy), (right, its) in zip((one[0] for one in mine), (one[0] for one in other), strict=True):
            assert float(likely) == pytest.approx(float(right), abs=1e-3) and str(greedy) == str(its)
    for task in ("picks", "writes"):
        scores = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
        assert {name: ours["results"][task][name] for name in scores} == pytest.approx(scores, abs=1e-3) and scores
