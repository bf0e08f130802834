"""Dataset -> token files, as a program: a tokenizer, then Megatron's `.bin/.idx` a split, by the hash of each document.

Writes `out/tokenizer` (a Hugging Face tokenizer folder) and `out/tokens` (the token files, the tokenizer, `tokens.json`).
Ranks, one a machine, share the units of the corpus and the job folder; what a killed one finished is not done again. The engine
is tasks/data/tokenizing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.common.process import read_json, write_json
from tasks.config.data import CONVERSATIONS, PreprocessingConfig
from tasks.data.corpus.inputs import Unit, cut, find_shards
from tasks.data.corpus.reading import read_strictly
from tasks.data.tokenizing.chat import open_chat, turn_ends
from tasks.data.tokenizing.checking import require_masked, require_sound
from tasks.data.tokenizing.engine import Choice, Disagreement, Tokenizers, choose
from tasks.data.tokenizing.merging import SHARDED, TokenFile, token_files, write_dataset
from tasks.data.tokenizing.splits import Splits
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Counts, Receipt, Work, encode_parallel, read_receipt, unit_bytes
from tasks.formats.chat_template import CHAT_TEMPLATE
from tasks.formats.mmididx import map_tokens, mask_of, write_blocks
from tasks.jobs.node.runtime import Rank, main

END_OF_DOCUMENT = "<|endoftext|>"
POLL_SECONDS = 0.2
ABOUT = "tokens.json"
TRAINED = "tokenizer.json"
"""In the job's folder: the files of the tokenizer that rank 0 trained, with their sha256."""
SLOW = "slow-engine.json"
"""In the job's folder when the fast engine may not be used; all ranks of the next attempt see it."""
SPREAD = 8
"""A corpus this many times larger than the tokenizer's sample is not read whole for it."""


def run(rank: Rank) -> dict[str, Any]:
    """Encode this rank's units, then merge and check this rank's files; rank 0 puts all of them in place."""
    parts, about = rank.folder / "parts", rank.output / "tokens" / ABOUT
    if about.exists():  # written last: an attempt before this one was killed after it
        shutil.rmtree(parts, ignore_errors=True)
        return {} if rank.rank else _metrics(read_json(about))
    config = PreprocessingConfig.model_validate(rank.settings["preprocessing"])
    shards = find_shards([rank.inputs["dataset"]])
    units = cut(shards, unit_bytes(shards))
    tokenizer = open_tokenizer(rank.inputs.get("tokenizer") or _trained(rank, units, config))
    chat = open_chat(tokenizer, config.chat_template) if config.text_field == CONVERSATIONS else None
    fields = (config.text_field,)
    work = Work(tokenizer, fields, _splits(config), append_eod=chat is None, chat=chat, immutable=True)
    choice = _engine(rank, units, work)
    _encode(rank, units[rank.rank :: rank.world_size], work, parts, choice=choice)
    sharing = rank.world_size
    if not rank.settings.get("shared_folder", True):  # the parts of all units come to rank 0 alone
        sharing = 1
        if rank.rank:
            return {}
    # Until the other ranks have done their units; when one of them dies, the launcher ends this one too.
    receipts = list[Receipt]()
    while len(receipts) < len(units):
        if receipt := read_receipt(units[len(receipts)], work, parts):
            receipts.append(receipt)
        elif rank.rank and about.exists():
            return {}  # rank 0 is done already, and clears up
        else:
            time.sleep(POLL_SECONDS)
    _require_documents(receipts, work)
    files = token_files(receipts, work, most_bytes=(config.shard_gib or math.inf) * 2**30)
    for file in files[rank.rank :: sharing]:
        _merge(file, work, parts, blocks=bool(config.shard_gib) and work.outputs[file.index][0] == SHARDED)
    if rank.rank:
        return {}
    while not all(_merged(file, parts).exists() for file in files):
        time.sleep(POLL_SECONDS)
    return _finish(rank, files, receipts, work, parts, engine=choice)


def _engine(rank: Rank, units: Sequence[Unit], work: Work) -> Choice:
    """The fast engine, unless it gave wrong tokens in an earlier attempt of this job, or does not say where a token stands."""
    output, slow = read_json(rank.folder / SLOW), Tokenizers(work.tokenizer)
    if work.chat:
        return Choice(slow)
    texts = _first_texts(units, work.fields[0])
    return Choice(slow, output["reason"]) if output else choose(work.tokenizer, texts)


def _trained(rank: Rank, units: Sequence[Unit], config: PreprocessingConfig) -> Path:
    """The folder of the tokenizer that rank 0 trains while the others wait for it."""
    folder, mark = rank.folder / "tokenizer", rank.folder / TRAINED

    def whole() -> bool:
        """Where machines share no folder, its files come one by one."""
        wanted = read_json(mark)
        return bool(wanted) and folder.is_dir() and _hashes(folder) == wanted

    if rank.rank == 0 and not whole():
        rank.progress(0, 1, "training the tokenizer")
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed before its mark
        save_tokenizer(train_tokenizer(units, config), folder)
        write_json(mark, _hashes(folder))
    while not whole():
        time.sleep(POLL_SECONDS)
    return folder


def _hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


def train_tokenizer(units: Sequence[Unit], config: PreprocessingConfig) -> Any:
    """A byte-level BPE tokenizer learned from a sample of the train split, which the documents' own hashes draw."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.tokenizer.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(units, config), trainer)
    return tokenizer


def sample(units: Sequence[Unit], config: PreprocessingConfig) -> Iterator[str]:
    """Documents of the train split, about `sample_bytes` of them, whichever way the corpus is divided into shards.

    A document's hash says whether it is taken; of a corpus far larger than the sample, whole units are passed over.
    """
    total = sum(unit.bytes for unit in units)
    wanted = config.tokenizer.sample_bytes
    splits = _splits(config)
    read = list(units)[:: max(1, total // (SPREAD * wanted))]
    share = min(1.0, wanted / max(1, sum(unit.bytes for unit in read)))
    for text in (text for unit in read for batch in read_strictly(unit, (config.text_field,)) for text in batch.texts):
        drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[8:16], "big") < share * 2**64
        if drawn and not splits.of(text):
            yield text


def _splits(config: PreprocessingConfig) -> Splits:
    return Splits((1 - config.heldout_fraction, config.heldout_fraction))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """A folder that `PreTrainedTokenizerFast.from_pretrained` loads; it is there whole or not at all."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save(str(temporary / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    os.replace(temporary, folder)


def _first_texts(units: Sequence[Unit], text_field: str) -> list[str]:
    """A sample that both engines are compared on: the first documents of the corpus."""
    for unit in units:
        for batch in read_strictly(unit, (text_field,)):
            return batch.texts
    return []


def _encode(rank: Rank, units: Sequence[Unit], work: Work, parts: Path, *, choice: Choice) -> None:
    total, read = sum(unit.bytes for unit in units), 0
    if choice.reason:
        print(f"encoding with {choice.engine.name}: {choice.reason}", flush=True)

    def told(more: int) -> None:
        nonlocal read
        read += more
        rank.progress(read, total, f"{read / 1e6:.1f} of {total / 1e6:.1f} MB encoded")

    workers = int(rank.settings["threads"])
    try:
        encode_parallel(units, work, parts, engine=choice.engine, workers=workers, report=told)
    except Disagreement as error:
        write_json(rank.folder / SLOW, {"reason": error.message})
        shutil.rmtree(parts)
        raise RuntimeError(f"{error.message}: all ranks start again with the slow engine") from error


def _require_documents(receipts: Sequence[Receipt], work: Work) -> None:
    for index, (name, _) in enumerate(work.outputs):
        if sum(receipt.counts[index].documents for receipt in receipts) == 0:
            fraction = work.splits.fractions[-1]
            raise ValueError(
                f"the {name} split has no documents: preprocessing.heldout_fraction is {fraction:g}; "
                f"{'raise' if name == 'heldout' else 'lower'} the fraction or publish more documents"
            )


def _merge(file: TokenFile, work: Work, parts: Path, *, blocks: bool) -> None:
    """Write one file beside the parts, and check it by reading it back; `_merged` is there once it is sound.

    With `blocks`, digests of its blocks too: a machine that trains on it may then leave it in the store, and read its part there.
    """
    if _merged(file, parts).exists():
        return
    write_dataset(parts / file.name, file.index, file.receipts, work, parts)
    if work.chat:
        require_masked(parts / file.name, work.tokenizer)
    else:
        require_sound(parts / file.name, work.tokenizer, eod=work.tokenizer.require_eod())
    if blocks:
        write_blocks(parts / file.name)
    _merged(file, parts).touch()


def _merged(file: TokenFile, parts: Path) -> Path:
    return parts / f"{file.name}.merged"


def _finish(
    rank: Rank, files: Sequence[TokenFile], receipts: Sequence[Receipt], work: Work, parts: Path, *, engine: Choice
) -> dict[str, Any]:
    tokens, tokenizer = rank.output / "tokens", work.tokenizer
    tokens.mkdir(exist_ok=True)
    if not rank.inputs.get("tokenizer"):
        shutil.copytree(rank.folder / "tokenizer", rank.output / "tokenizer", dirs_exist_ok=True)
    names = [name for file in files for name in (file.name, mask_of(Path(file.name)).name)]
    for name in (f"{name}.{ending}" for name in names for ending in ("bin", "idx", "blocks")):
        if (parts / name).exists():  # not moved yet by an attempt before this one
            os.replace(parts / name, tokens / name)
    shutil.copytree(tokenizer.path, tokens / "tokenizer", dirs_exist_ok=True)
    (tokens / "tokenizer" / "tokenizer.json").write_text(tokenizer.rules, encoding="utf-8")
    totals = (sum((r.counts[index] for r in receipts), Counts()) for index in range(len(work.outputs)))
    splits = {split: dataclasses.asdict(total) for (split, _), total in zip(work.outputs, totals, strict=True)}
    about = {
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.require_eod(),
        "engine": engine.engine.name,
        "splits": splits,
    }
    if work.chat:
        (tokens / "tokenizer" / CHAT_TEMPLATE).write_text(work.chat.template.source, encoding="utf-8")
        learned = [
            (work.outputs[file.index][0], int(map_tokens(mask_of(tokens / file.name)).sum(dtype=np.int64)))
            for file in files
        ]
        about["answers"] = {split: sum(count for of, count in learned if of == split) for split in splits}
        about["turn_ends"] = turn_ends(tokens / files[0].name, tokenizer.rules)
    if len(files) > len(splits):
        about["files"] = {split: [f.name for f in files if work.outputs[f.index][0] == split] for split in splits}
    write_json(tokens / ABOUT, about)
    shutil.rmtree(parts)
    return _metrics(about)


def _metrics(about: dict[str, Any]) -> dict[str, Any]:
    counts = {
        f"{split}_{name}": float(value) for split, each in about["splits"].items() for name, value in each.items()
    }
    answers = {f"{split}_answer_tokens": float(count) for split, count in about.get("answers", {}).items()}
    return {"metrics": {"vocab_size": float(about["vocab_size"]), **counts, **answers}}


if __name__ == "__main__":
    sys.exit(main(run))
