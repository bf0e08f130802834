"""A corpus with copies across its files, and the jobs that profile and tokenize it, run by the supervisor to their end."""

import json
import random

import pyarrow.parquet as pq

from tasks import preprocess, validate
from tasks.artifacts import Dataset, unqualified
from tasks.compute import open_backend
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.data import PreprocessingConfig, TokenizerConfig, ValidationConfig
from tasks.data.corpus.dividing import Marked, write_marks
from tasks.orchestration.job_spec import job_of
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

SHARDS, DOCUMENTS = 8, 800
DATASET = Dataset(name="text", version="0" * 64, uri="")
PREPROCESSING = PreprocessingConfig(
    heldout_fraction=0.1, tokenizer=TokenizerConfig(vocab_size=300, sample_bytes=200_000)
)
PARTS = {"validate": "parts/unit-*/receipt.json", "preprocess": "parts/*.json"}
STAGES = (*PARTS, "divide")


def write_corpus(folder):
    """About 13 MB, of a dozen units; of ten documents one is a copy of another, often of another shard, and one nearly so."""
    drawn = random.Random(1)
    folder.mkdir()
    words = [f"word{number}" for number in range(5000)]
    documents: list[str] = []
    for number in range(SHARDS * DOCUMENTS):
        fresh = " ".join(drawn.choices(words, k=230))
        match number % 10:
            case 4:
                fresh = f"{drawn.choice(documents)} {fresh.partition(' ')[0]}"
            case 9:
                fresh = drawn.choice(documents)
        documents.append(fresh)
    for shard in range(SHARDS):
        texts = documents[shard * DOCUMENTS : (shard + 1) * DOCUMENTS]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def write_short_documents(folder):
    """About 20 MB of 300,000 documents, a quarter of which nearly repeat another: finding those takes seconds."""
    drawn = random.Random(2)
    folder.mkdir()
    words = [f"w{number}" for number in range(3000)]
    documents: list[list[str]] = []
    for number in range(300_000):
        near = number % 4 == 3
        documents.append([*drawn.choice(documents), "again"] if near else drawn.choices(words, k=14))
    for shard in range(SHARDS):
        texts = documents[shard::SHARDS]
        lines = (json.dumps({"text": " ".join(text)}) + "\n" for text in texts)
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return folder


def run_stage(stage, config, corpus, folder, *, dataset=DATASET, files=None, home=None):
    """Run a stage's job to its end; what the supervisor says, and what the job made. `files` opens a store by its name."""
    on = unqualified(config.for_data)
    if stage == "validate":
        program = validate.program(dataset, ValidationConfig(), 0.1, (), on=on)
    elif stage == "divide":
        program = validate.divide_program(dataset, write_every_tenth(corpus, folder.parent / "marks"), left=True, on=on)
    else:
        program = preprocess.program(dataset, PREPROCESSING, None, on=on)
    token = f"{abs(hash((str(folder), stage))):032x}"
    job = job_of(stage, token, program, on=on, folders={"dataset": str(corpus)})
    journal = StoreJournal(open_store(home or folder.parent))
    result = run(
        job, backend=open_backend(on.config, files), folder=folder, journal=journal, watch=Watch(), cluster=on.config
    )
    return result, {"validate": profile_of, "preprocess": tokens_of, "divide": divided_of}[stage](folder)


def write_every_tenth(corpus, marks):
    """Marks for every tenth line of all shards but the last."""
    names = sorted(path.name for path in corpus.iterdir())
    lines = ((shard, line) for shard in range(len(names) - 1) for line in range(1, DOCUMENTS + 1, 10))
    write_marks(marks, names, (Marked(shard, line, ("too short",), f"line {line}") for shard, line in lines))
    return marks


def divided_of(folder):
    out = folder / "out"
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def profile_of(folder):
    """All that a profile says, but how long it took."""
    out = folder / "out" / "profile"
    columns = json.loads((out / "columns.json").read_text())
    kept = {name: value for name, value in columns.items() if name not in ("seconds", "speed")}
    return kept, (out / "shards.json").read_text(), pq.read_table(out / "documents.parquet").to_pydict()


def tokens_of(folder):
    out = folder / "out" / "tokens"
    names = [f"{split}_text_document.{ending}" for split in ("train", "heldout") for ending in ("bin", "idx")]
    return {name: (out / name).read_bytes() for name in (*names, "tokenizer/tokenizer.json")}
