"""A checkpoint, held-out text and files for every suite, and the job that measures them, run by the supervisor to its end."""

import json
import random

from tiny_model import CORPUS, make_checkpoint

from tasks import evaluate
from tasks.artifacts import Checkpoint, Tokens, unqualified
from tasks.compute import open_backend
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.evaluation import EvaluationConfig
from tasks.formats.mmididx import TokenWriter
from tasks.orchestration.job_spec import job_of
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

CONTEXT = 64
CHECKPOINT = Checkpoint(name="tiny", version="0" * 64, uri="")
TOKENS = Tokens(name="text", version="0" * 64, uri="")
OUTPUTS = ("documents.json", "evaluation.json", "openings.json")
LIKELIHOOD = "task: likelihood\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: ['yes', 'no']\n"
ROLLING = "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\n"
WRITTEN = "task: written\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
PERPLEXITY = "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n"


def write_material(folder, *, documents=60):
    """The inputs of an evaluation, as folders by name."""
    folder.mkdir(parents=True)
    (folder / "checkpoint").mkdir()
    make_checkpoint(folder / "checkpoint")
    (folder / "checkpoint" / "training.json").write_text(json.dumps({"sequence_length": CONTEXT}))
    _write_tokens(folder / "checkpoint", folder / "tokens", documents=documents)
    drawn = random.Random(2)
    rows = [{"q": _text(drawn, 40), "a": "x", "label": drawn.randrange(2)} for _ in range(40)]
    files = folder / "files"
    files.mkdir()
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "likelihood.yaml").write_text(LIKELIHOOD + COMMON + "doc_to_target: label\n")
    (files / "rolling.yaml").write_text(ROLLING + COMMON + PERPLEXITY)
    settings = "generation_kwargs: {until: ['.'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"
    (files / "written.yaml").write_text(WRITTEN + COMMON + settings)
    labelled = folder / "moods.jsonl"
    moods = ({"text": _text(drawn, 30 + number), "label": "ab"[number % 2]} for number in range(90))
    labelled.write_text("".join(json.dumps(mood) + "\n" for mood in moods))
    return folder


def everything(folder, **more):
    """Settings that ask for every suite that a process can be measured with on any machine."""
    given = {
        "probe_samples": 80,
        "labelled": [{"name": "mood", "file": str(folder / "moods.jsonl")}],
        "lm_eval": {"tasks": ["likelihood", "rolling", "written"], "data": str(folder / "files")},
        **more,
    }
    return EvaluationConfig.model_validate(given)


def measure(config, cluster, material, folder, *, files=None, home=None):
    """Run the stage's job to its end; what the supervisor says, and what the job wrote. `files` opens a store by its name."""
    on = evaluate.machines(unqualified(cluster))
    program = evaluate.program(CHECKPOINT, TOKENS, config, sequence_length=CONTEXT, on=on)
    inputs = {name: str(material / name) for name in ("checkpoint", "tokens")}
    job = job_of("evaluate", f"{abs(hash(str(folder))):032x}", program, on=on, folders=inputs)
    journal = StoreJournal(open_store(home or folder.parent))
    backend = open_backend(on.config, files)
    result = run(job, backend=backend, folder=folder, journal=journal, watch=Watch(), cluster=on.config)
    return result, {name: (folder / "out" / name).read_bytes() for name in OUTPUTS}


def _write_tokens(checkpoint, folder, *, documents):
    from tasks.data.tokenizing.tokenizer import load, open_tokenizer

    opened, drawn = open_tokenizer(checkpoint), random.Random(1)
    words, eod = load(opened.rules), opened.require_eod()
    (folder / "tokenizer").mkdir(parents=True)
    for split, count in (("train", 200), ("heldout", documents)):
        writer = TokenWriter(folder / f"{split}_text_document", opened.vocab_size)
        for _ in range(count):
            writer.add_document([*words.encode(_text(drawn, drawn.randrange(50, 900))).ids, eod])
        writer.close()
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": opened.vocab_size, "eod_id": eod}))
    (folder / "tokenizer" / "tokenizer.json").write_text(opened.rules)


def _text(drawn, length):
    start = drawn.randrange(len(CORPUS))
    return (CORPUS * 3)[start : start + length].strip() or "x"
