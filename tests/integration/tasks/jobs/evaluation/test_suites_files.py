"""The suites `labelled` and `lm_eval`: files that a user gives, what is wrong with them by line, and time that runs out."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from suite_material import EOD, suite_bench, tiny_measured
from waiting import limit

from tasks.common.errors import Missing
from tasks.config.evaluation import SHIPPED, EvaluationConfig, LabelledFile
from tasks.jobs.evaluation import lm_eval_suite
from tasks.jobs.evaluation.labelled import figures_of, label_scores, labelled
from tasks.jobs.evaluation.lm_eval_suite import gather, lm_eval, suite_of
from tasks.jobs.evaluation.suites import digest_of, run_suites


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return tiny_measured(tmp_path_factory.mktemp("checkpoint"))


def save(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_label_scores_as_its_tokens_do_one_by_one(tmp_path, measured):
    bench, file = suite_bench(tmp_path, measured), LabelledFile(file="/x", prompt="{text} =>")
    texts, names = ["def first", "x" * 600, "a"], ["good", "very bad"]
    table = label_scores(bench, file, texts, names)
    for row, text in enumerate(texts):
        for column, name in enumerate(names):
            end = bench.tokenizer.encode(f" {name}").ids
            longest = max(len(bench.tokenizer.encode(f" {each}").ids) for each in names)
            prompt = [EOD, *bench.tokenizer.encode(f"{text} =>").ids][-(bench.context - longest) :]
            wanted = 0.0
            for place, token in enumerate(end):
                logits = bench.model(torch.tensor([[*prompt, *end[:place]]])).logits[0, -1].double()
                wanted += float(torch.log_softmax(logits, -1)[token].detach())
            # A batch of padded rows multiplies in another order: 7e-8 of the value here, 2e-5 seen on another machine.
            assert math.isclose(table[row, column], wanted, rel_tol=1e-4)


def test_accuracy_and_macro_f1_are_those_of_scikit_learn():
    from sklearn.metrics import accuracy_score, f1_score

    drawn = np.random.default_rng(3)
    names = np.array(["a", "b", "c"])
    labels, said = (names[drawn.integers(0, 3, 60)].tolist() for _ in range(2))
    found = figures_of(labels, said, confidence=0.95)
    assert math.isclose(found["accuracy"], accuracy_score(labels, said))
    assert math.isclose(found["macro_f1"], f1_score(labels, said, average="macro", labels=names))
    assert found["low"] < found["accuracy"] < found["high"]


def test_what_the_model_itself_says_is_all_right_and_the_opposite_all_wrong(tmp_path, measured):
    texts, names = [f"text number {number}" for number in range(12)], ["yes", "no"]
    bench = suite_bench(tmp_path, measured)
    best = label_scores(bench, LabelledFile(file="/x"), texts, sorted(names)).argmax(axis=1)
    best[0] = 1 - best[0]  # so that both labels are there
    rows = [{"text": text, "label": sorted(names)[at]} for text, at in zip(texts, best, strict=True)]
    folder = tmp_path / "dataset"
    folder.mkdir()
    save(folder / "a.jsonl", rows)
    file = {"name": "mood", "file": "moods@0123456789abcdef"}
    told, _ = run_suites(
        suite_bench(tmp_path, measured, inputs={"files-moods": folder}, labelled=[file]), {"labelled": labelled}
    )
    suite = told["labelled"]
    assert (suite["samples"], suite["metrics"]["mood_count"]) == (12, 11)
    assert suite["metrics"]["mood_accuracy"] == pytest.approx(11 / 12)
    assert suite["details"]["files"]["mood"]["samples"] == 12
    sha256 = suite["details"]["sha256"]["mood"]
    assert sha256 == digest_of([folder / "a.jsonl"]) and len(sha256) == 64
    save(folder / "a.jsonl", rows[::-1])
    assert digest_of([folder / "a.jsonl"]) != sha256


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "line 3: no JSON"),
        (b'"a"', "line 3: str where an object with text and label should be"),
        (b'{"text": "a"}', "line 3: `label` must be text, and is None"),
        (b'{"text": "a", "label": 1}', "line 3: `label` must be text, and is 1"),
        (b'{"text": " ", "label": "x"}', "line 3: `text` must be text"),
        (b'{"text": "\xff", "label": "x"}', "line 3: no JSON in UTF-8"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, measured, line, said):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "a", "label": "x"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"evaluation.labelled.labelled: bad.jsonl, {said}"):
        labelled(suite_bench(tmp_path, measured, labelled=[{"file": str(file)}]))


def test_a_file_without_records_of_one_label_or_not_there_is_refused(tmp_path, measured):
    for text, said in {
        "": "has no records",
        '{"text": "a", "label": "x"}\n': "has 1 different labels; give 2 to 64",
    }.items():
        (tmp_path / "few.jsonl").write_text(text)
        with pytest.raises(ValueError, match=said):
            labelled(suite_bench(tmp_path, measured, labelled=[{"file": str(tmp_path / "few.jsonl")}]))
    with pytest.raises(ValueError, match="is not on this machine"):
        labelled(suite_bench(tmp_path, measured, labelled=[{"file": str(tmp_path / "none.jsonl")}]))
    with pytest.raises(ValueError, match="was not given that dataset"):
        labelled(suite_bench(tmp_path, measured, labelled=[{"file": "moods"}]))


def test_settings_name_datasets_once_and_refuse_what_cannot_be():
    given = {"toxic_words": "words", "labelled": [{"file": "moods"}, {"name": "b", "file": "/a/b.jsonl"}]}
    config = EvaluationConfig(**given, code={"problems": SHIPPED}, lm_eval={"tasks": ["arc"], "data": "moods"})
    assert config.files == ("words", "moods")
    assert EvaluationConfig(**config.model_dump(mode="json")) == config
    for bad, said in (
        ({"labelled": [{"file": "a"}, {"file": "b"}]}, "two files of one name"),
        ({"labelled": [{}]}, "set evaluation.labelled"),
        ({"labelled": [{"file": "a", "prompt": "none"}]}, "write {text} in it, once"),
        ({"lm_eval": {"tasks": ["arc"]}}, "set evaluation.lm_eval.data"),
    ):
        with pytest.raises(ValueError, match=said):
            EvaluationConfig(**bad)


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1}
"""


def harness_data(folder):
    """A task of one's own as a dataset packs it, and ARC, which the harness knows, with its validation data."""
    folder.mkdir()
    rows = [{"question": f"Is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(8)]
    save(folder / "capitals.jsonl", rows)
    save(folder / "text-00000.jsonl", [{"text": TASK, "path": "tasks/capitals.yaml"}])
    choices = {"text": ["a stone", "water"], "label": ["A", "B"]}
    arc = [{"id": str(n), "question": f"Which is wet? {n}", "choices": choices, "answerKey": "B"} for n in range(5)]
    for split in ("train", "validation", "test"):
        save(folder / f"arc_easy.{split}.jsonl", arc)
    return folder


def test_a_prompt_of_the_harness_opens_as_a_document_does(tmp_path, measured):
    pytest.importorskip("lm_eval")
    rows = [{"question": "def first(", "answer": "values"}, {"question": "<|endoftext|>import", "answer": "os"}]
    (tmp_path / "data").mkdir()
    save(tmp_path / "data" / "capitals.jsonl", rows)
    task = TASK.replace("multiple_choice", "loglikelihood").replace('doc_to_choice: "{{choices}}"\n', "")
    task = task.replace("metric: acc, aggregation: mean", "metric: perplexity, aggregation: perplexity")
    (tmp_path / "data" / "capitals.yaml").write_text(task.replace("answer\n", '"{{answer}}"\n'))
    bench = suite_bench(tmp_path, measured, lm_eval={"tasks": ["capitals"], "data": str(tmp_path / "data")})
    told = lm_eval(bench).metrics
    right = []
    for row in rows:
        prompt, end = (bench.tokenizer.encode(text).ids for text in (row["question"], row["answer"]))
        read = torch.tensor([[*([] if prompt[0] == EOD else [EOD]), *prompt, *end]])
        chances = torch.log_softmax(bench.model(read).logits[0, :-1].double(), -1).gather(-1, read[0, 1:, None])
        right.append(float(chances[-len(end) :].sum().detach()))
    assert told["capitals_perplexity"] == pytest.approx(math.exp(-sum(right) / 2), rel=1e-4)


@pytest.mark.long
def test_tasks_of_ones_own_and_of_the_harness_run_by_name_from_files(tmp_path, measured):
    pytest.importorskip("lm_eval")
    wanted = {"tasks": ["capitals", "arc_easy"], "data": str(harness_data(tmp_path / "data"))}
    told, _ = run_suites(suite_bench(tmp_path, measured, lm_eval=wanted), {"lm_eval": lm_eval})
    suite = told["lm_eval"]
    assert suite["samples"] == 5 and suite["details"]["samples"] == {"arc_easy": 5, "capitals": 8}, suite
    assert len(suite["details"]["sha256"]) == 64
    assert 0 <= suite["metrics"]["capitals_acc"] <= 1 and 0 <= suite["metrics"]["arc_easy_acc_norm"] <= 1
    assert "capitals_acc" not in suite["lower_is_better"] and "capitals_acc_stderr" in suite["lower_is_better"]


def test_a_harness_out_of_time_is_killed_and_says_so(tmp_path, measured):
    pytest.importorskip("lm_eval")
    wanted = {"tasks": ["capitals"], "data": str(harness_data(tmp_path / "data"))}
    told, _ = run_suites(suite_bench(tmp_path, measured, lm_eval=wanted, suite_seconds=1), {"lm_eval": lm_eval})
    assert told["lm_eval"]["metrics"] == {} and "did not end within" in told["lm_eval"]["failed"]


@pytest.fixture
def forked(monkeypatch):
    """The harness runs in a fork of a process that has imported torch, which is not so with a cache of the hub of its own."""
    start = subprocess.Popen

    def begin(argv, *, env, **how):
        own = {name: value for name, value in env.items() if name != "HF_HOME"}
        code = f"# fork: jobs\nimport runpy\nrunpy.run_module({argv[-1]!r}, run_name='__main__', alter_sys=True)"
        return start([argv[0], "-c", code], env=own, **how)

    monkeypatch.setattr(lm_eval_suite, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": begin}))


@pytest.mark.usefixtures("forked")
def test_templates_do_not_reach_the_inside_of_python(tmp_path, measured):
    pytest.importorskip("lm_eval")
    place = harness_data(tmp_path / "data")
    (place / "text-00000.jsonl").unlink()
    trick = "{{ ''.__class__.__mro__[1].__subclasses__() }} {{question}}"
    (place / "capitals.yaml").write_text(TASK.replace("{{question}}", trick))
    with pytest.raises(ValueError, match="SecurityError"):
        lm_eval(suite_bench(tmp_path, measured, lm_eval={"tasks": ["capitals"], "data": str(place)}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("doc_to_text: !function tricks.run", "names Python code"),
        ("a: !!python/object/apply:os.system [x]", "names Python code"),
        ("doc_to_text: !%66unction subprocess.check_output", "names Python code"),
        ("%TAG !e! !func\n---\ndoc_to_text: !e!tion subprocess.check_output", "names Python code"),
        ("a: &a [*a, !<!function> x]", "names Python code"),
        ("include: evil.json", "has `include`"),
        ('"inc\\x6cude": [evil.json]', "has `include`"),
        ("task: [{custom_dataset: x}]", "has `custom_dataset`"),
        ("dataset_path: pandas", "say json or parquet"),
        ("dataset_path: json\ntask: [{dataset_path: /given}]", "say json or parquet"),
        ("metric_list: [{metric: /given/evil.py}]", "a path"),
        ("metric_list: [{metric: '..'}]", "a path"),
        ("metric_list: [{metric: exact_match, hf_evaluate: true}]", "has `hf_evaluate`"),
        ("generation_kwargs: {until: ['.'], custom_generate: /given}", "with 'custom_generate'"),
        ("generation_kwargs: {trust_remote_code: true}", "with 'trust_remote_code'"),
        ("x: &x {custom_generate: /given}\ngeneration_kwargs: {<<: *x}", "with '<<'"),
        ("generation_kwargs: &x [custom_generate]\ny: *x", "generation_kwargs with"),
        ("dataset_kwargs: {streaming: true, data_files: {test: a.json}}", "with 'streaming'"),
        ("dataset_kwargs: {storage_options: {simplecache: {cache_storage: /home}}}", "with 'storage_options'"),
        ("dataset_kwargs: {data_files: {test: ['simplecache:///home/evil.pth', a.json]}}", "lies beside it"),
        ("dataset_kwargs: {data_files: 'http://127.0.0.1/a.json'}", "lies beside it"),
        ("dataset_kwargs: {data_files: {test: ../policy.yaml}}", "lies beside it"),
        ("x: &x {streaming: true}\ndataset_kwargs: {<<: *x, data_files: a.json}", "with '<<'"),
        ("x: &x {test: /etc/passwd}\ndataset_kwargs: {data_files: {<<: *x}}", "lies beside it"),
        ("dataset_kwargs: [streaming]", "only data_files"),
        ("a: [", "is no YAML"),
    ],
)
def test_given_yaml_may_not_name_code_nor_other_files(tmp_path, text, said):
    place, target = tmp_path / "place", tmp_path / "target"
    place.mkdir()
    target.mkdir()
    (place / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        gather(place, target)
    assert not list(target.iterdir())
    with pytest.raises(ValueError, match="give the folder"):
        gather(place / "bad.yaml", target)


@pytest.mark.parametrize("name", ["order.json", "said.json"])
def test_a_given_file_does_not_take_the_place_of_ours(tmp_path, name):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / name).write_text("{}")
    with pytest.raises(ValueError, match="has a name of ours"):
        gather(tmp_path / "given", tmp_path)


def test_the_harness_takes_code_from_its_own_folder_alone(tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "evil.json").write_text("doc_to_text: !function subprocess.check_output")
    (tmp_path / "a.yaml").write_text("include: evil.json\ntask: a")
    script = (
        "import sys; from pathlib import Path; from tasks.jobs.evaluation.lm_eval_run import _hold_functions; _hold_functions()\n"
        "from lm_eval.tasks import _yaml_loader as loader\n"
        "own = Path(loader.__file__).parent / 'hellaswag' / 'hellaswag.yaml'\n"
        "assert callable(loader.load_yaml(own)['process_docs'])\n"
        "loader.load_yaml(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit(120), check=False)
    assert "ValueError: subprocess.check_output is Python code, which data may not name" in ran.stderr


def test_without_the_harness_the_command_is_told(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(lm_eval_suite.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Missing, match="not installed") as caught:
        lm_eval(suite_bench(tmp_path, measured, lm_eval={"tasks": ["a"], "data": "/tmp"}))
    assert "pip install 'headway[measure]'" in caught.value.remedy


def test_results_become_plain_names_and_only_finite_numbers():
    results = {
        "gsm-8k": {"exact_match,strict-match": 0.5, "word_perplexity,none": 9.0, "acc,none": math.nan, "sample_len": 3}
    }
    better = {"gsm-8k": {"exact_match": True, "word_perplexity": False}}
    suite = suite_of(
        {"results": results, "samples": {"gsm-8k": 3}, "higher_is_better": better, "versions": {"gsm-8k": "1"}}
    )
    assert suite.metrics == {"gsm_8k_exact_match_strict_match": 0.5, "gsm_8k_word_perplexity": 9.0}
    assert suite.lower_is_better == ("gsm_8k_word_perplexity",) and suite.samples == 3
