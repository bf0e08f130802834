"""What a model is measured on, and what it must reach, as settings.

What measures is tasks/jobs/evaluate.py; who judges, tasks/evaluate.py. A field's docstring is its help text, in
docs/configuration.md and in Prefect's form.
"""

from __future__ import annotations

from pydantic import Field

from tasks.settings import Positive, Settings


class EvaluationConfig(Settings):
    """What the model is measured on."""

    max_bytes: Positive = 1_000_000
    """Held-out text that is read, in bytes, whole documents in a fixed order."""
    min_documents: Positive = 5
    """Fewest held-out documents that a verdict may rest on."""
    bootstrap_samples: Positive = 1000
    """Times that the held-out documents are drawn again, with replacement."""
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """Of the bootstrap interval."""
    seed: int = Field(1234, ge=0)
    """Of the bootstrap's draws."""


class ComparisonConfig(Settings):
    """What a model must reach to be exported, and to stay. Not in any stage's key: a new limit measures nothing anew."""

    min_gain_over_bigram: float = Field(0.10, ge=-1.0, lt=1.0)
    """Share by which the model's bits per byte must lie under the Kneser-Ney bigram's."""
    max_loss_to_champion: float = Field(0.02, ge=0.0)
    """Non-inferiority margin: the upper end of the interval of the relative loss to the champion must stay under it."""
    max_loss_since_promotion: float = Field(0.10, ge=0.0)
    """Share by which a champion's bits per byte on the newest data may lie over those at its promotion; for revalidate."""
