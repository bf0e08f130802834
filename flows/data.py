"""The two data stages as every flow calls them: a dataset judged against the version before it, then its tokens."""

from __future__ import annotations

from flows.inputs import accepted_before, datasets, resolve
from tasks.artifacts import Tokenizer, Tokens, Validation, parse_ref, unqualified
from tasks.cluster_config import ClusterConfig
from tasks.data_config import PreprocessingConfig, ValidationConfig
from tasks.lifecycle import current
from tasks.preprocess import preprocess
from tasks.storage.store import find
from tasks.validate import validate


def validated(
    name: str, config: ValidationConfig, preprocessing: PreprocessingConfig, cluster: ClusterConfig
) -> Validation:
    """The verdict on a dataset. Raises Unknown for a dataset, a benchmark or a tokenizer that there is not."""
    given = resolve(name)
    _tokenizer(preprocessing.tokenizer.ref)  # used later; missed before anything is spent
    before, benchmarks = accepted_before(given), datasets(config.benchmarks)
    return validate(given, config, before, preprocessing.heldout_fraction, benchmarks, on=unqualified(cluster))


def tokenized(validation: Validation, config: PreprocessingConfig, cluster: ClusterConfig) -> Tokens:
    """The tokens of what a verdict accepted. Raises GateFailed."""
    tokenizer = _tokenizer(config.tokenizer.ref)
    return preprocess(validation.require(), config, tokenizer, under=validation, on=unqualified(cluster))


def _tokenizer(ref: str) -> Tokenizer | None:
    if not ref:
        return None
    store = current().store
    manifest = find(store, *parse_ref(ref, kind="tokenizer"))
    return Tokenizer(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest))
