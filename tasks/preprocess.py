"""Dataset -> Tokens: Megatron's `.bin/.idx` for the train and held-out splits, and the tokenizer that made them.

The work is done by the program tasks/jobs/preprocess.py with the engine of tasks/data/tokenizing; the file format is
tasks/formats/mmididx.py.
"""

from __future__ import annotations

from tasks.artifacts import Cluster, Dataset, Tokenizer, Tokens, Validation
from tasks.config.data import PreprocessingConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import publish, run_job


@stage(
    version=2,
    shown=Shown(
        line="{train_tokens:.0f} tokens, vocabulary {vocab_size:.0f}",
        metrics=("train_tokens", "vocab_size"),
        part="tokens.json",
    ),
)
def preprocess(
    dataset: Dataset, config: PreprocessingConfig, tokenizer: Tokenizer | None, *, under: Validation, on: Cluster
) -> Tokens:
    """Tokenize a dataset under its verdict; without a tokenizer one is trained, and is an artifact of its own."""
    job = run_job(program(dataset, config, tokenizer, on=on), on=on)
    used = tokenizer or publish(job.output / "tokenizer", Tokenizer, name=dataset.name)
    return publish(
        job.output / "tokens",
        Tokens,
        name=dataset.name,
        metrics=job.result["metrics"],
        made_from=(dataset, used),
    )


def program(dataset: Dataset, config: PreprocessingConfig, tokenizer: Tokenizer | None, *, on: Cluster) -> Program:
    """What tokenizes: one rank a machine, with all of its threads."""
    settings = {
        "preprocessing": config.model_dump(mode="json"),
        "threads": on.threads_per_node,
        "shared_folder": on.config.shares_folder,
    }
    inputs = {"dataset": dataset, **({"tokenizer": tokenizer} if tokenizer else {})}
    return Program("tasks.jobs.preprocess", settings, inputs)
