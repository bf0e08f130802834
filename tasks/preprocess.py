"""Dataset -> Tokens: Megatron's `.bin/.idx` for the train and held-out splits, and the tokenizer that made them.

The work is done by the program tasks/jobs/preprocess.py with the engine of tasks/tokenizing; the file format is
tasks/formats/mmididx.py.
"""

from __future__ import annotations

from tasks.artifacts import Cluster, Dataset, Tokenizer, Tokens, Validation
from tasks.data_config import PreprocessingConfig
from tasks.stage import stage
from tasks.workbench import publish, run_job


@stage(version=2)
def preprocess(
    dataset: Dataset, config: PreprocessingConfig, tokenizer: Tokenizer | None = None, *, under: Validation, on: Cluster
) -> Tokens:
    """Tokenize a dataset under its verdict; without a tokenizer one is trained, and is an artifact of its own."""
    threads = on.threads_per_node
    settings = {"preprocessing": config.model_dump(mode="json"), "threads": threads}
    inputs = {"dataset": dataset, **({"tokenizer": tokenizer} if tokenizer else {})}
    job = run_job("tasks.jobs.preprocess", settings, inputs=inputs, on=on, ranks=1, threads=threads)
    used = tokenizer or publish(job.output / "tokenizer", Tokenizer, name=dataset.name)
    return publish(
        job.output / "tokens",
        Tokens,
        name=dataset.name,
        metrics=job.result["metrics"],
        made_from=(dataset, used),
    )
