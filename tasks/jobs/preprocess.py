"""Dataset -> token files, as a program: train a byte-level BPE tokenizer, encode, split by content hash.

Writes `out/tokenizer` (a Hugging Face tokenizer folder) and `out/tokens` (Megatron `.bin/.idx` a split, the tokenizer, and
`tokens.json`). One rank; the tokenizer's own threads use the cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.data_config import PreprocessingConfig
from tasks.formats.documents import Document, read_documents
from tasks.formats.mmididx import TokenWriter, open_tokens
from tasks.jobs.runtime import Rank, main

END_OF_DOCUMENT = "<|endoftext|>"
BATCH_BYTES = 4 << 20


def run(rank: Rank) -> dict[str, Any]:
    """Both outputs, checked by reading them back."""
    config = PreprocessingConfig.model_validate(rank.settings["preprocessing"])
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(rank.settings["threads"])
    dataset, total = rank.inputs["dataset"], _count(rank.inputs["dataset"], config)
    tokenizer = train_tokenizer(dataset, config, sample_every=_every(total, config))
    save_tokenizer(tokenizer, rank.output / "tokenizer")
    tokens = rank.output / "tokens"
    tokens.mkdir(exist_ok=True)
    splits = encode(dataset, tokenizer, config, tokens, rank=rank, total=total["bytes"])
    shutil.copytree(rank.output / "tokenizer", tokens / "tokenizer", dirs_exist_ok=True)
    eod, size = tokenizer.token_to_id(END_OF_DOCUMENT), tokenizer.get_vocab_size()
    (tokens / "tokens.json").write_text(json.dumps({"vocab_size": size, "eod_id": eod, "splits": splits}, indent=1))
    check_output(tokens, splits, eod)
    metrics = {f"{split}_{name}": float(value) for split, counts in splits.items() for name, value in counts.items()}
    return {"metrics": {"vocab_size": float(size), **metrics}}


def is_heldout(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split: by the hash of its content, so that it never changes sides."""
    first = hashlib.sha256(text.encode()).digest()[:8]
    return int.from_bytes(first, "big") < fraction * 2**64


def train_tokenizer(dataset: Path, config: PreprocessingConfig, *, sample_every: int) -> Any:
    """A byte-level BPE tokenizer learnt from every n-th document of the train split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.tokenizer.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = (
        d.text for d in read_documents(dataset, config.text_field) if not is_heldout(d.text, config.heldout_fraction)
    )
    tokenizer.train_from_iterator((text for i, text in enumerate(documents) if i % sample_every == 0), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """A folder that `PreTrainedTokenizerFast.from_pretrained` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def encode(
    dataset: Path, tokenizer: Any, config: PreprocessingConfig, folder: Path, *, rank: Rank, total: int
) -> dict[str, dict[str, int]]:
    """Write both splits in one pass; counts by split. Raises ValueError when a split stays without documents."""
    size, eod = tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_DOCUMENT)
    writers = {split: TokenWriter(folder / f"{split}_text_document", size) for split in ("train", "heldout")}
    read = dict.fromkeys(writers, 0)
    for batch in _batches(read_documents(dataset, config.text_field)):
        for document, encoding in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            split = "heldout" if is_heldout(document.text, config.heldout_fraction) else "train"
            writers[split].add_document([*encoding.ids, eod] if encoding.ids else [])
            read[split] += len(document.text.encode())
        done = sum(read.values())
        rank.progress(done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB encoded")
    closed = {split: writer.close() for split, writer in writers.items()}
    for split, (documents, _) in closed.items():
        if not documents:
            raise ValueError(
                f"the {split} split has no documents: {sum(d for d, _ in closed.values())} documents, "
                f"preprocessing.heldout_fraction {config.heldout_fraction}; "
                f"{'raise' if split == 'heldout' else 'lower'} the fraction or publish more documents"
            )
    return {s: {"documents": d, "tokens": t, "bytes": read[s]} for s, (d, t) in closed.items()}


def check_output(folder: Path, splits: dict[str, dict[str, int]], eod: int) -> None:
    """Read the files back: counts as written, and every document ends with the end-of-document token."""
    for split, counts in splits.items():
        opened = open_tokens(folder / f"{split}_text_document")
        ends = opened.boundaries[1:][opened.boundaries[1:] > opened.boundaries[:-1]] - 1
        assert opened.document_count == counts["documents"] and len(opened.tokens) == counts["tokens"], split
        assert (opened.tokens[ends] == eod).all(), f"{split}: a document does not end with the end-of-document token"


def _count(dataset: Path, config: PreprocessingConfig) -> dict[str, int]:
    counts = {"documents": 0, "bytes": 0}
    for document in read_documents(dataset, config.text_field):
        counts["documents"] += 1
        counts["bytes"] += len(document.text.encode())
    return counts


def _every(total: dict[str, int], config: PreprocessingConfig) -> int:
    return max(1, -(-total["bytes"] // config.tokenizer.sample_bytes))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    sys.exit(main(run))
