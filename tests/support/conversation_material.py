"""A small set of conversations that can be learnt, and their tokens by a tiny base model's tokenizer and chat template."""

import json
import os
import random
import shutil
import subprocess
import sys

from base_material import make_base

from tasks.config.data import PreprocessingConfig

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG = PreprocessingConfig(text_field="messages", heldout_fraction=0.2)


def conversations(count, seed=0):
    """Of one or two questions: which word comes after, in a list that is the same for all."""
    drawn = random.Random(seed)
    words = [
        "first",
        "values",
        "default",
        "return",
        "class",
        "stack",
        "items",
        "pop",
        "raise",
        "import",
        "range",
        "print",
    ]
    records = []
    for number in range(count):
        turns = []
        for _ in range(drawn.choice((1, 1, 2))):
            word = drawn.randrange(len(words))
            turns.append({"role": "user", "content": f"{number}: after {words[word]}?"})
            turns.append({"role": "assistant", "content": words[(word + 1) % len(words)]})
        records.append({"messages": turns})
    return records


def write_conversations(folder, count=60):
    folder.mkdir(parents=True)
    lines = (json.dumps(record) + "\n" for record in conversations(count))
    (folder / "chats.jsonl").write_text("".join(lines))
    return folder


def make_chat_base(folder):
    """The tiny base model, with a chat template."""
    make_base(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def start_preprocessing(job, dataset, tokenizer, config=CONFIG):
    """Run the job of preprocessing to its end; returns its exit code and its folder."""
    job.mkdir(parents=True)
    settings = {"preprocessing": config.model_dump(mode="json"), "threads": 1}
    inputs = {"dataset": str(dataset), "tokenizer": str(tokenizer)}
    (job / "config.json").write_text(json.dumps({"settings": settings, "inputs": inputs}))
    environment = {**os.environ, "HEADWAY_JOB": str(job), "RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run([sys.executable, "-m", "tasks.jobs.preprocess"], env=environment, check=False).returncode


def write_chat_tokens(job, base, count=60):
    """The tokens of a small set, as preprocessing makes them of the base's tokenizer alone.

    A trained network is written with all files of that folder: with the base's weights among them it would be the base again.
    """
    dataset, tokenizer = (job.parent / f"{job.name}-{kind}" for kind in ("dataset", "tokenizer"))
    write_conversations(dataset, count)
    tokenizer.mkdir()
    for name in TOKENIZER:
        shutil.copyfile(base / name, tokenizer / name)
    assert start_preprocessing(job, dataset, tokenizer) == 0
    return job / "out" / "tokens"
