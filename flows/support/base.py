"""The base model of a run: the checkpoint that `training.base` names, and the tokenizer that its tokens must be of.

What makes a version of one is `headway checkpoint publish`; what training does with it is tasks/jobs/training/starting.py.
See docs/fine-tuning.md.
"""

from __future__ import annotations

from tasks.artifacts import Checkpoint, Tokenizer, parse_ref
from tasks.common.errors import IntegrityError, Unknown
from tasks.config.data import PreprocessingConfig
from tasks.config.flows import RetrainConfig
from tasks.formats.model_folder import require_positions
from tasks.orchestration.run import pinned
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find


def base_of(store: Store, config: RetrainConfig) -> tuple[Checkpoint, ...]:
    """The base model, alone, or nothing: what is handed to a stage only where there is one.

    Raises Unknown; ValueError where its learnt positions end before the context that the export is to declare.
    """
    if not config.training.base:
        return ()
    manifest = pinned(store, config.training.base, kind="checkpoint")
    if config.export.context_length:
        require_positions(store.fetch(manifest), config.export.context_length)
    return (Checkpoint(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest)),)


def tokenizer_of_base(store: Store, config: RetrainConfig) -> Tokenizer | None:
    """The tokenizer of the run's base model; None: it has none.

    Raises ValueError when another one is configured, Unknown or IntegrityError when nobody knows it.
    """
    for base in base_of(store, config):
        found, given = _tokenizer(store, _tokenizer_ref(store, base.ref)), tokenizer_given(store, config.preprocessing)
        if given and given.version != found.version:
            raise ValueError(
                f"preprocessing.tokenizer.ref {given.ref} is not the tokenizer of {config.training.base}, "
                f"which is {found.ref}: leave it empty"
            )
        return found
    return None


def tokenizer_of_tuned(store: Store, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of the base model that a checkpoint was fine-tuned from; None: it was trained from nothing.

    Raises Unknown or IntegrityError when nobody knows it.
    """
    bases = _inputs(find(store, *parse_ref(checkpoint.ref)), "checkpoint")
    return _tokenizer(store, _tokenizer_ref(store, bases[0])) if bases else None


def tokenizer_given(store: Store, config: PreprocessingConfig) -> Tokenizer | None:
    """The tokenizer that is configured; None: one is trained. Raises Unknown."""
    return _tokenizer(store, config.tokenizer.ref) if config.tokenizer.ref else None


def _tokenizer(store: Store, ref: str) -> Tokenizer:
    manifest = pinned(store, ref, kind="tokenizer")
    return Tokenizer(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest))


def _tokenizer_ref(store: Store, ref: str) -> str:
    """The tokenizer that a checkpoint descends from: one that was published is made from it, a trained one from its tokens."""
    manifest = find(store, *parse_ref(ref))
    for made_from in _inputs(manifest, "tokenizer"):
        return made_from
    for tokens in _inputs(manifest, "tokens"):
        try:
            return _tokenizer_ref(store, tokens)
        except Unknown as error:
            raise IntegrityError(
                f"{tokens}, which {ref} was trained on, is gone, and with it which tokenizer that was",
                remedy="Publish the model again with its tokenizer: headway checkpoint publish NAME FOLDER.",
            ) from error
    raise IntegrityError(
        f"no tokenizer is known of {ref}",
        remedy="Publish the model with its tokenizer: headway checkpoint publish NAME FOLDER.",
    )


def _inputs(manifest: Manifest, kind: str) -> list[str]:
    return [ref for ref in manifest.provenance.inputs if ref.startswith(f"{kind}/")]
