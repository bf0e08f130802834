"""Tokens -> Checkpoint: the training run, as one job.

The loop is the program tasks/jobs/train.py; what keeps it alive is tasks/compute (next: tasks/compute/slurm.py). It resumes from
its newest verified checkpoint, whatever was killed.
"""

from __future__ import annotations

from tasks.artifacts import Checkpoint, Cluster, Plan, Tokens
from tasks.programs import Program
from tasks.promotion import require_signer, sign
from tasks.stage import stage
from tasks.training_config import ExecutionConfig, TrainingConfig
from tasks.workbench import publish, run_job


@stage(version=1)
def train(tokens: Tokens, config: TrainingConfig, *, how: ExecutionConfig, under: Plan, on: Cluster) -> Checkpoint:
    """Train a network on the train split, within the plan, and sign what came out; `how` changes no model and is in no key."""
    require_signer(Checkpoint, config.model)
    asked = program(tokens, config, how, every_steps=under.checkpoint_every_steps, keep=under.keep_checkpoints)
    job = run_job(asked, on=on)
    checkpoint = publish(job.output, Checkpoint, name=config.model, metrics=job.result["metrics"])
    sign(checkpoint)
    return checkpoint


def program(tokens: Tokens, config: TrainingConfig, how: ExecutionConfig, *, every_steps: int, keep: int) -> Program:
    """What trains: a checkpoint every so many steps, of which so many are kept."""
    settings = {
        "training": config.model_dump(mode="json"),
        "execution": how.model_dump(mode="json"),
        "checkpoint_every_steps": every_steps,
        "keep_checkpoints": keep,
    }
    return Program("tasks.jobs.train", settings, {"tokens": tokens}, progress="checkpoints/LATEST")
