"""The two data stages as every flow calls them: a dataset judged against the version before it, then its tokens."""

from __future__ import annotations

from flows.support.inputs import accepted_before, datasets, resolve, tokenizer_given
from tasks.artifacts import Tokenizer, Tokens, Validation, unqualified
from tasks.config.cluster import ClusterConfig
from tasks.config.data import PreprocessingConfig, ValidationConfig
from tasks.orchestration.run import current
from tasks.preprocess import preprocess
from tasks.validate import validate


def validated(
    name: str, config: ValidationConfig, preprocessing: PreprocessingConfig, cluster: ClusterConfig
) -> Validation:
    """The verdict on a dataset. Raises Unknown for a dataset, a benchmark or a tokenizer that there is not."""
    given = resolve(name)
    tokenizer_given(current().store, preprocessing)  # used later; missed before anything is spent
    before, benchmarks = accepted_before(given), datasets(config.benchmarks)
    return validate(given, config, before, preprocessing.heldout_fraction, benchmarks, on=unqualified(cluster))


def tokenized(
    validation: Validation, config: PreprocessingConfig, cluster: ClusterConfig, tokenizer: Tokenizer | None = None
) -> Tokens:
    """The tokens of what a verdict accepted, by a base model's tokenizer or the one that is configured. Raises GateFailed."""
    tokenizer = tokenizer or tokenizer_given(current().store, config)
    return preprocess(validation.require(), config, tokenizer, under=validation, on=unqualified(cluster))
