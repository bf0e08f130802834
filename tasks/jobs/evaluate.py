"""The program that measures a checkpoint: bits per byte, accuracy and calibration on held-out text, by slice; and suites.

One rank. Any Hugging Face causal language model can be measured: where its tokenizer differs from the tokens' own,
the same text is encoded again, and only per-byte numbers are compared. Its parts are tasks/jobs/evaluation/, the baselines
tasks/jobs/evaluation/ngram.py, intervals tasks/evaluation/scores.py; verdicts are the stages'. See docs/evaluation.md.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
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
from tasks.jobs.evaluation.figures import figures, metrics
from tasks.jobs.evaluation.heldout import HELDOUT, Heldout, encode_for, read_heldout
from tasks.jobs.evaluation.labelled import labelled
from tasks.jobs.evaluation.lm_eval_suite import lm_eval
from tasks.jobs.evaluation.probes import leakage, memorisation, toxicity
from tasks.jobs.evaluation.scoring import Scored, by_position, context_of, joined, load_measured, longest, score
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
}
"""The suites that there are, by the names that rules and metrics use, in the order in which they run."""


def run(rank: Rank) -> dict[str, Any]:
    """Measure `inputs["checkpoint"]` on the held-out split of `inputs["tokens"]`; returns the metrics."""
    config = EvaluationConfig(**rank.settings["evaluation"])
    torch.set_num_threads(rank.settings["threads"])
    heldout = read_heldout(rank.inputs["tokens"], config)
    encoded = encode_for(rank.inputs["checkpoint"], rank.inputs["tokens"], heldout)
    model = load_measured(rank.inputs["checkpoint"], config)
    context = context_of(model, rank.settings["sequence_length"])
    scored = score(model, encoded, context=context, rank=rank)
    rank.progress(1, 1, "comparing with n-gram models")
    documents = {**_columns(heldout, scored), **_beside(rank.inputs["tokens"], heldout)}
    others = dict(_others(model, config, context=context, rank=rank))
    own = {rank.settings["source"]: (documents, scored.certainty)} if others else {}
    evaluation = figures(documents, scored.certainty, {**own, **others}, config)
    bench = Bench(
        model=model,
        tokenizer=Tokenizer.from_file(str(rank.inputs["checkpoint"] / "tokenizer.json")),
        eod_id=encoded.eod_id,
        opening=encoded.context,
        context=context,
        heldout=heldout,
        rank=rank,
        config=config,
    )
    # How long a text the model takes, and its bits by position. Joined rows are as long as those that it was trained
    # on.
    path = rank.inputs["checkpoint"] / "training.json"
    trained = min(int(read_json(path)["sequence_length"]), context) if path.is_file() else 0
    reached = measured = longest(encoded, context)
    rows = None
    if reached < trained and (long := joined(encoded, trained)):
        rows, measured = score(model, long, context=context, rank=rank).positions, trained
    lengths = {"declared": measured if context == trained else context, "measured": measured}
    evaluation |= {"context": lengths, "positions": by_position(scored.positions, rows, config, reached=reached)}
    evaluation["heldout"] = {"documents": len(heldout.texts), "available": heldout.available, "share": heldout.share}
    evaluation["suites"], seconds = run_suites(bench, SUITES)
    write_json(rank.output / "documents.json", documents)
    if others:
        payload = {name: columns for name, (columns, _) in others.items()}
        write_json(rank.output / "sources.json", {"own": rank.settings["source"], "others": payload})
    write_json(rank.output / "evaluation.json", evaluation)
    write_json(rank.output / "openings.json", openings(heldout.texts))
    return {"metrics": {**metrics(evaluation), **{f"{name}.seconds": took for name, took in seconds.items()}}}


def _others(
    model: Any, config: EvaluationConfig, *, context: int, rank: Rank
) -> Iterator[tuple[str, tuple[dict[str, Any], NDArray[np.float64]]]]:
    """The other corpora of a mixture that hold text out: the name of each, its columns, and how sure the model was."""
    for name, tokens in rank.inputs.items():
        if not name.startswith(OTHER) or not (tokens / f"{HELDOUT}.idx").is_file():
            continue
        heldout = read_heldout(tokens, config, verdict=False)
        if heldout.texts:
            encoded = encode_for(rank.inputs["checkpoint"], tokens, heldout)
            scored = score(model, encoded, context=context, rank=rank)
            yield name.removeprefix(OTHER), (_columns(heldout, scored), scored.certainty)


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
    joined = np.concatenate(heldout.encoded.documents)
    unigram, bigram = (
        ngram.document_bits(one, joined, heldout.encoded.lengths, eod_id=heldout.encoded.context[-1]) for one in fitted
    )
    return {
        "bigram_bits": _rounded(bigram),
        "unigram_bits": _rounded(unigram),
        "kinds": [kind_of(text) for text in heldout.texts],
    }


def _rounded(bits: NDArray[np.float64]) -> list[float]:
    return [round(value, BITS_DECIMALS) for value in bits.tolist()]


if __name__ == "__main__":
    sys.exit(main(run))
