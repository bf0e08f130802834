"""What tests of suites begin with: a tiny model at a bench, with the settings of the suite."""

import numpy as np
import tiny_model
from tokenizers import Tokenizer

from tasks.config.evaluation import EvaluationConfig
from tasks.jobs.evaluation.heldout import Encoded, Heldout
from tasks.jobs.evaluation.scoring import load_model
from tasks.jobs.evaluation.suites import Bench
from tasks.jobs.node.runtime import Rank

EOD = 0


def tiny_measured(folder):
    """A checkpoint of random weights, and its model."""
    checkpoint = tiny_model.make_checkpoint(folder)
    return checkpoint, load_model(checkpoint)


def suite_bench(folder, measured, *, inputs=None, **config):
    checkpoint, model = measured
    given = {"checkpoint": checkpoint, **(inputs or {})}
    rank = Rank(folder=folder, rank=0, world_size=1, attempt=1, settings={"threads": 1}, inputs=given, output=folder)
    return Bench(
        model=model,
        tokenizer=Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
        eod_id=EOD,
        opening=(EOD,),
        context=tiny_model.CONTEXT,
        heldout=Heldout(texts=["text"], byte_counts=np.array([4]), encoded=Encoded([], EOD)),
        rank=rank,
        config=EvaluationConfig(probe_samples=0, **config),
    )
