"""Dataset -> Tokens: a tokenizer, and Megatron's `.bin/.idx` for the train and held-out splits.

The work is done by the program tasks/jobs/preprocess.py; the file format is tasks/formats/mmididx.py.
"""

from __future__ import annotations

from tasks.artifacts import Cluster, Dataset, Tokenizer, Tokens, Validation
from tasks.data_config import PreprocessingConfig
from tasks.stage import stage
from tasks.workbench import publish, run_job


@stage(version=1)
def preprocess(dataset: Dataset, config: PreprocessingConfig, *, under: Validation, on: Cluster) -> Tokens:
    """Tokenize a dataset under its verdict; the tokenizer is an artifact of its own."""
    threads = on.ranks_per_node * on.threads_per_rank
    settings = {"preprocessing": config.model_dump(mode="json"), "threads": threads}
    job = run_job("tasks.jobs.preprocess", settings, inputs={"dataset": dataset}, on=on, ranks=1, threads=threads)
    tokenizer = publish(job.output / "tokenizer", Tokenizer, name=dataset.name)
    return publish(
        job.output / "tokens",
        Tokens,
        name=dataset.name,
        metrics=job.result["metrics"],
        made_from=(dataset, tokenizer),
    )
