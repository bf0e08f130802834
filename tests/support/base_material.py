"""A tiny model that others trained, as a Hugging Face folder, and tokens of its tokenizer."""

import json
import shutil

import numpy as np
from tiny_model import CORPUS, VOCABULARY, make_checkpoint

from tasks.formats.mmididx import TokenWriter

CARD = "---\nlicense: apache-2.0\n---\n\n# Tiny\n"
ROWS = VOCABULARY + 4
"""Rows of the embedding: more than words, as many models have."""


def make_base(folder, *, shards=False):
    """A Llama of two layers in bfloat16, with padding in its settings and rows that no word has."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    make_checkpoint(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network.resize_token_embeddings(ROWS, mean_resizing=False)
    network.config.pad_token_id = 0
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, **({"max_shard_size": "60KB"} if shards else {}))
    (folder / "README.md").write_text(CARD)
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a model must not run')\n")
    return folder


def write_tokens_of(base, folder, *, documents=60):
    """Pieces of a text in the base's own tokens, with the files of its tokenizer as preprocessing writes them."""
    from tasks.data.tokenizing.tokenizer import load, open_tokenizer

    opened = open_tokenizer(base)
    words, eod = load(opened.rules), opened.require_eod()
    folder.mkdir()
    writer, generator = TokenWriter(folder / "train_text_document", opened.vocab_size), np.random.default_rng(0)
    for start in generator.integers(len(CORPUS) - 200, size=documents):
        writer.add_document([*words.encode(CORPUS[start : start + 200]).ids, eod])
    count, tokens = writer.close()
    splits = {"train": {"documents": count, "tokens": tokens, "bytes": tokens}}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": opened.vocab_size, "eod_id": eod, "splits": splits}))
    (folder / "tokenizer").mkdir()
    shutil.copyfile(base / "tokenizer_config.json", folder / "tokenizer" / "tokenizer_config.json")
    (folder / "tokenizer" / "tokenizer.json").write_text(opened.rules)
    return folder
