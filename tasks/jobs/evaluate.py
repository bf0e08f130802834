"""The program that measures a checkpoint: bits per byte, accuracy and calibration on held-out text, by slice; and suites.

Ranks divide the work by batches, and rank 0 puts it together: the figures have the same bits for any number of them
(tasks/jobs/evaluation/division.py). Any Hugging Face causal language model can be measured: where its tokenizer differs from the
tokens' own, the same text is encoded again, and only per-byte numbers are compared. Its parts are tasks/jobs/evaluation/, the
baselines tasks/jobs/evaluation/ngram.py, intervals tasks/evaluation/scores.py; verdicts are the stages'. See docs/evaluation.md.

`evaluation.json` holds the figures of the whole, calibration, and every slice; what suites say is added last.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasks.common.process import read_json, write_json
from tasks.config.evaluation import EvaluationConfig
from tasks.data.corpus.openings import openings
from tasks.evaluation.performance import kind_of
from tasks.formats.mmididx import open_split
from tasks.jobs.evaluation import ngram
from tasks.jobs.evaluation.code_suite import code
from tasks.jobs.evaluation.division import Division, OnRankZero
from tasks.jobs.evaluation.figures import figures, metrics
from tasks.jobs.evaluation.heldout import HELDOUT, Encoded, Heldout, encode_for, read_heldout
from tasks.jobs.evaluation.labelled import labelled
from tasks.jobs.evaluation.lm_eval_suite import lm_eval
from tasks.jobs.evaluation.probes import leakage, memorisation, toxicity
from tasks.jobs.evaluation.prompts import prompts
from tasks.jobs.evaluation.scoring import (
    Scored,
    add_up,
    by_position,
    context_of,
    joined,
    load_measured,
    longest,
    scored_unit,
    to_score,
)
from tasks.jobs.evaluation.suites import Bench, Measure, run_suites
from tasks.jobs.node.runtime import Rank, main

BITS_DECIMALS = 6
"""Published bits are rounded to what float32 can carry; every published score is computed from the rounded ones."""
OTHER = "tokens-"
"""What the names of the other corpora of a mixture begin with, as inputs."""

SUITES: dict[str, Measure] = {
    "memorisation": memorisation,
    "leakage": leakage,
    "toxicity": toxicity,
    "code": code,
    "labelled": labelled,
    "lm_eval": lm_eval,
    "prompts": prompts,
}
"""The suites that there are, by the names that rules and metrics use, in the order in which they run."""


def run(rank: Rank) -> dict[str, Any]:
    """Measure `inputs["checkpoint"]` on the held-out split of `inputs["tokens"]`; returns the metrics, on rank 0."""
    config = EvaluationConfig(**rank.settings["evaluation"])
    torch.set_num_threads(rank.settings["threads"])
    heldout = read_heldout(rank.inputs["tokens"], config)
    encoded = encode_for(rank.inputs["checkpoint"], rank.inputs["tokens"], heldout)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    model, sharded = load_measured(rank.inputs["checkpoint"], config, rank=rank, local_rank=local_rank)
    parts, idle, together = rank.folder / "parts", dict[str, Any](), dict[str, Any]()
    if sharded:
        from tasks.jobs.evaluation.sharded import Lockstep  # torch's FSDP2 and accelerate take seconds to import

        lockstep = Lockstep(model)
        idle, together = {"idle": lockstep.idle}, {"sharded": True, "meet": lockstep.meet}
    bench = Bench(
        model=model,
        tokenizer=Tokenizer.from_file(str(rank.inputs["checkpoint"] / "tokenizer.json")),
        eod_id=encoded.eod_id,
        opening=encoded.opening_tokens,
        context=context_of(model, rank.settings["sequence_length"]),
        heldout=heldout,
        rank=rank,
        config=config,
        division=Division(parts, rank.rank, rank.world_size, **idle),
        **together,
    )
    # How long a text the model takes, and its bits by position. Joined rows are as long as those that it was trained
    # on.
    path = rank.inputs["checkpoint"] / "training.json"
    trained = min(int(read_json(path)["sequence_length"]), bench.context) if path.is_file() else 0
    reached = longest(encoded, bench.context)
    long = joined(encoded, trained) if reached < trained else None
    scored = _begin("heldout", bench, encoded)
    rows = _begin("joined", bench, long) if long else None
    others = {name: (read, _begin(f"{OTHER}{name}", bench, text)) for name, read, text in _others(rank, config)}
    try:
        evaluation = _put_together(bench, scored(), {name: (each, ended()) for name, (each, ended) in others.items()})
        measured = trained if rows else reached
        lengths = {"declared": measured if bench.context == trained else bench.context, "measured": measured}
        of_rows = rows().positions if rows else None
        evaluation |= {
            "context": lengths,
            "positions": by_position(scored().positions, of_rows, config, reached=reached),
        }
        evaluation["heldout"] = {
            "documents": len(heldout.texts),
            "available": heldout.available,
            "share": heldout.share,
        }
    except OnRankZero:
        run_suites(bench, SUITES)
        bench.meet()
        return {}
    evaluation["suites"], seconds = run_suites(bench, SUITES)
    bench.meet()
    write_json(rank.output / "evaluation.json", evaluation)
    write_json(rank.output / "openings.json", openings(heldout.texts))
    shutil.rmtree(parts, ignore_errors=True)
    how = {"ranks": float(rank.world_size), "sharded": float(sharded)} if rank.world_size > 1 else {}
    return {"metrics": {**metrics(evaluation), **{f"{name}.seconds": took for name, took in seconds.items()}, **how}}


def _begin(name: str, bench: Bench, encoded: Encoded) -> Callable[[], Scored]:
    """Score this rank's share of documents; what is returned waits for the other ranks' and says it, or raises OnRankZero."""
    units = to_score(bench.model, encoded, context=bench.context)

    def report(done: int, total: int) -> None:
        bench.rank.progress(done, total, f"{done} of {total} batches of windows")

    share = bench.division.share(name, units, lambda unit: scored_unit(bench.model, encoded, unit), report=report)
    return cache(lambda: add_up(encoded, units, share.all(), context=bench.context))


def _others(rank: Rank, config: EvaluationConfig) -> list[tuple[str, Heldout, Encoded]]:
    """The other corpora of a mixture that hold text out: the name of each, its text, and that in the checkpoint's ids."""
    results = []
    for name, tokens in rank.inputs.items():
        if not name.startswith(OTHER) or not (tokens / f"{HELDOUT}.idx").is_file():
            continue
        heldout = read_heldout(tokens, config, verdict=False)
        if heldout.texts:
            encoded = encode_for(rank.inputs["checkpoint"], tokens, heldout)
            results.append((name.removeprefix(OTHER), heldout, encoded))
    return results


def _put_together(bench: Bench, scored: Scored, others: dict[str, tuple[Heldout, Scored]]) -> dict[str, Any]:
    """The figures of all documents beside n-gram models; what is of each document is written to the output."""
    rank = bench.rank
    rank.progress(1, 1, "comparing with n-gram models")
    documents = {**_columns(bench.heldout, scored), **_beside(rank.inputs["tokens"], bench.heldout)}
    sources = {name: (_columns(read, other), other.certainty) for name, (read, other) in others.items()}
    own = {rank.settings["source"]: (documents, scored.certainty)} if sources else {}
    write_json(rank.output / "documents.json", documents)
    if sources:
        payload = {name: columns for name, (columns, _) in sources.items()}
        write_json(rank.output / "sources.json", {"own": rank.settings["source"], "others": payload})
    return figures(documents, scored.certainty, {**own, **sources}, bench.config)


def _columns(heldout: Heldout, scored: Scored) -> dict[str, Any]:
    """What the model made of each document, and which document it is."""
    return {
        "bytes": heldout.byte_counts.tolist(),
        "model_bits": _rounded(scored.bits),
        "tokens": scored.tokens.tolist(),
        "correct": scored.correct.tolist(),
        "hashes": [hashlib.sha256(text.encode()).hexdigest() for text in heldout.texts],
    }


def _beside(tokens: Path, heldout: Heldout) -> dict[str, Any]:
    """What each document is beside the model: bits under the n-gram models, and its kind."""
    # The n-gram models are of the training split; of one of more than `ngram.MOST_TOKENS` a sample is read.
    vocab_size = int(read_json(tokens / "tokens.json")["vocab_size"])
    stream = ngram.sampled(open_split(tokens, "train").tokens)
    fitted = ngram.fit_unigram(stream, vocab_size), ngram.fit_bigram(stream, vocab_size, eod_id=heldout.encoded.eod_id)
    encoded = heldout.encoded
    joined = np.concatenate(encoded.documents)
    scored = None if encoded.answers is None else np.concatenate(encoded.answers)
    first = encoded.opening_tokens[-1]
    unigram, bigram = (ngram.document_bits(one, joined, encoded.lengths, eod_id=first, scored=scored) for one in fitted)
    return {
        "bigram_bits": _rounded(bigram),
        "unigram_bits": _rounded(unigram),
        "kinds": [kind_of(text) for text in heldout.texts],
    }


def _rounded(bits: NDArray[np.float64]) -> list[float]:
    return [round(value, BITS_DECIMALS) for value in bits.tolist()]


if __name__ == "__main__":
    sys.exit(main(run))
