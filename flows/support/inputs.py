"""What flows are called with, and what its names stand for: a configuration, which may come from a schedule of another release,
datasets, the base model that training starts from, and the other corpora of a mixture. And the data stages, as every flow calls
them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

from prefect.runtime import flow_run as runtime
from pydantic import Field, ValidationError, WithJsonSchema

from flows.support.blocks import cluster_block
from flows.support.continuing import require_possible
from flows.support.prefect_run import parameters_of_deployment
from tasks.artifacts import (
    Check,
    Checkpoint,
    Dataset,
    Index,
    Tokenizer,
    Tokens,
    Validation,
    parse_ref,
    require_checks,
    unqualified,
)
from tasks.common.errors import IntegrityError, Unknown
from tasks.common.validation import explain
from tasks.config.base import Settings, digest
from tasks.config.cluster import ClusterConfig
from tasks.config.continue_from import ContinueFrom
from tasks.config.data import LicensesConfig, PreprocessingConfig, ValidationConfig
from tasks.config.files import load, load_cluster, part_of, places, presets, with_settings
from tasks.config.flows import RetrainConfig
from tasks.config.training import TrainingConfig
from tasks.data.licenses import checks, judge
from tasks.data.suite import read_suite
from tasks.formats.model_folder import DESCRIPTION, require_positions
from tasks.orchestration.node_exclusion import require_proof
from tasks.orchestration.run import current, pinned
from tasks.preprocess import preprocess
from tasks.registry.licenses import licenses_of
from tasks.serving.vllm import require_architecture, require_servable
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find
from tasks.validate import validate


@dataclass(frozen=True)
class Inputs:
    """What a retraining is given beside its dataset."""

    base: Checkpoint | None
    """The model that training starts from; None: it starts from nothing."""
    tokenizer: Tokenizer | None
    """The base model's."""
    mixed: tuple[Tokens, ...]
    """The other corpora of a mixture, in the order of their shares."""
    files: tuple[Dataset, ...]
    """What suites of the evaluation read."""
    suites: str | None
    """A digest of what they read by path."""


def inputs_of(dataset: str, config: RetrainConfig, continue_from: ContinueFrom | None) -> Inputs:
    """Look up what a retraining is given, before anything is spent.

    Raises Unknown, IntegrityError or ValueError for what does not exist, is damaged or does not fit.
    """
    require_proof(config.cluster, config.benchmark)
    require_servable(config.deployment)
    store = current().store
    require_possible(current().home, store, continue_from, config)
    return Inputs(
        base=base_of(store, config),
        tokenizer=tokenizer_of_base(store, config),
        mixed=mixed_in(store, dataset, config.training, heldout_fraction=config.preprocessing.heldout_fraction),
        files=datasets(config.evaluation.files),
        suites=content_of(config.evaluation.paths),
    )


def require_licenses(dataset: Dataset, given: Inputs, config: LicensesConfig) -> None:
    """Raise GateFailed when the licence of the data or of the base model forbids it, and nobody has waived that.

    A licence that is not judged is told, and closes nothing.
    """
    refs = (dataset.ref, *([given.base.ref] if given.base else []), *(tokens.ref for tokens in given.mixed))
    judged = judge(licenses_of(current().store, refs), config.waivers, datetime.now(UTC).date())
    for one in judged:
        if one.verdict in ("waived", "not judged") and (one.terms.license or one.terms.origin):
            name = f"the licence of {one.ref.partition('@')[0]}, {one.terms.license or 'unknown'}, is {one.verdict}"
            current().observer.happened("validate", "licence", f"{name}: {one.why}")
    if failed := checks(judged):
        require_checks("validate", failed)


def content_of(paths: Iterable[str]) -> str | None:
    """A digest of the files behind paths, and in folders; None without any. What only the job's machine has is left out."""
    files = [
        file for path in paths for file in (sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)])
    ]
    sums = {}
    for file in filter(Path.is_file, files):
        with file.open("rb") as opened:
            sums[str(file)] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digest(sums) if sums else None


def validated(
    dataset: Dataset, config: ValidationConfig, preprocessing: PreprocessingConfig, cluster: ClusterConfig
) -> Validation:
    """The verdict on a dataset, judged against the version before it. Raises Unknown for a benchmark or a tokenizer that there is
    not, ValueError for a suite that cannot be read. A suite counts by its content, wherever its file lies."""
    tokenizer_given(current().store, preprocessing)  # used later; missed before anything is spent
    with_template(preprocessing)
    before, benchmarks, against = (
        accepted_before(dataset),
        datasets(config.benchmarks),
        indices(config.against, dataset),
    )
    own = read_suite(Path(config.suite), current().home) if config.suite else None
    rules, suite = config.model_copy(update={"suite": ""}), own.digest if own else None
    heldout = preprocessing.heldout_fraction
    on = unqualified(cluster.for_data)
    return validate(dataset, rules, before, heldout, benchmarks, suite, against, on=on, own=own)


def tokenized(
    validation: Validation, config: PreprocessingConfig, cluster: ClusterConfig, tokenizer: Tokenizer | None = None
) -> Tokens:
    """The tokens of what a verdict accepted, by a base model's tokenizer or the one that is configured. Raises GateFailed."""
    tokenizer = tokenizer or tokenizer_given(current().store, config)
    config = with_template(config)
    return preprocess(validation.require(), config, tokenizer, under=validation, on=unqualified(cluster.for_data))


def with_template(config: PreprocessingConfig) -> PreprocessingConfig:
    """The settings with the chat template itself, which counts by its content, wherever its file lies.

    Raises ValueError where there is no such file.
    """
    template = config.chat_template
    if not template or "{%" in template or "{{" in template:
        return config
    path = Path(template)
    if not path.is_file():
        raise ValueError(f"preprocessing.chat_template {template} is no file: give the path of a chat template (Jinja)")
    return config.model_copy(update={"chat_template": path.read_text(encoding="utf-8")})


# The base model of a run: the checkpoint that `training.base` names, and the tokenizer that its tokens must be of.
#
# What makes a version of one is `headway checkpoint publish`; what training does with it is
# tasks/jobs/training/starting.py. See docs/fine-tuning.md.


def base_of(store: Store, config: RetrainConfig) -> Checkpoint | None:
    """The base model; None where training starts from nothing.

    Raises Unknown; ValueError where its learnt positions end before the context that the export is to declare.
    """
    if not config.training.base:
        return None
    manifest = pinned(store, config.training.base, kind="checkpoint")
    by_vllm = config.exported.format == "safetensors"
    if config.export.context_length or by_vllm:
        with tempfile.TemporaryDirectory() as folder:
            store.copy_files(manifest, DESCRIPTION, Path(folder))
            require_positions(Path(folder), config.export.context_length)
            if by_vllm:
                description = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
                require_architecture(description, named=config.training.base)
    return Checkpoint(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest))


def tokenizer_of_base(store: Store, config: RetrainConfig) -> Tokenizer | None:
    """The tokenizer of the run's base model; None: it has none.

    Raises ValueError when another one is configured, Unknown or IntegrityError when nobody knows it.
    """
    base = base_of(store, config)
    if base is None:
        return None
    result, given = _tokenizer(store, _tokenizer_ref(store, base.ref)), tokenizer_given(store, config.preprocessing)
    if given and given.version != result.version:
        raise ValueError(
            f"preprocessing.tokenizer.ref {given.ref} is not the tokenizer of {config.training.base}, "
            f"which is {result.ref}: leave it empty"
        )
    return result


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


# The other corpora of a run that trains on a mixture: the tokens artifacts that `training.mixture` names beside its
# own.
#
# How samples are drawn of them is tasks/jobs/data/sources.py, which also refuses tokens of another tokenizer; near
# duplicates across the split are tasks/jobs/data/crossing.py's. See docs/training.md, "Data".


def others(dataset: str, config: TrainingConfig) -> dict[str, str]:
    """References of the other corpora by their names. Raises ValueError when two have one name, or the run's own is not there."""
    if not config.mixture:
        return {}
    _, own, _ = parse_ref(dataset, kind="dataset")
    names = [parse_ref(ref, kind="tokens")[1] for ref in config.mixture]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"training.mixture names tokens/{name} twice: give one share to one version of it")
    if own not in names:
        raise ValueError(f"training.mixture has no share for the run's own tokens: add {own}, the name of its dataset")
    return {name: ref for name, ref in zip(names, config.mixture, strict=True) if name != own}


def mixed_in(store: Store, dataset: str, config: TrainingConfig, *, heldout_fraction: float) -> tuple[Tokens, ...]:
    """The other corpora, in the order of the shares; `heldout_fraction` is that of the run's own tokens.

    Raises Unknown for one that there is not, ValueError for one that holds out another fraction of its documents.
    """
    results = [pinned(store, ref, kind="tokens") for ref in others(dataset, config).values()]
    for manifest in results:
        # Of a document that two corpora have, the fraction decides where it is: with two, one trains on what the other holds
        # out. Tokens of whose fraction nothing is known pass.
        preprocessing = (manifest.provenance.config or {}).get("preprocessing") or {}
        theirs = preprocessing.get("heldout_fraction", heldout_fraction)
        if theirs != heldout_fraction:
            name, (_, own, _) = manifest.provenance.name, parse_ref(dataset, kind="dataset")
            raise ValueError(
                f"training.mixture mixes dataset/{own}, which holds out {heldout_fraction:g} of its documents, with "
                f"dataset/{name}, which holds out {theirs:g}: a document of both may be trained on in one and measured in the "
                f"other. Set preprocessing.heldout_fraction = {theirs:g}, or preprocess {name} again with {heldout_fraction:g}"
            )
    return tuple(Tokens(name=m.provenance.name, version=m.version, uri=store.uri_of(m)) for m in results)


C = TypeVar("C", bound=Settings)
REMEDY = (
    "Correct it where the run was started: in the form; for a deployment, `headway up` registers what is shipped again; for a "
    "schedule, `set` in the platform's settings. docs/configuration.md lists all settings"
)

# The fields of the forms. What is left empty has a value that the schema of its field holds, not null: Prefect's page sends
# every default along, and draws a switch between types, with nothing to type into, for what may be null.
Preset = Annotated[str, WithJsonSchema({"type": "string", "enum": ["", *presets()]})]
Where = Annotated[str, WithJsonSchema({"type": "string", "enum": ["", *places()]})]
Overrides = tuple[Annotated[str, Field(pattern=r"^[^=\s]+=")], ...]
Config = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": True})]
NOTHING: dict[str, Any] = {}


def configured(
    form: type[C],
    config: Any,
    preset: Any = "",
    where: str = "",
    overrides: Iterable[str] = (),
    *,
    cluster: str = "",
    **training: float,
) -> C:
    """The configuration of the running flow run, by the fields of its form; those of `training` that are not 0 count.

    What `config` does not name is as in the deployment, and what that does not name is as in the preset. Raises ValueError: for
    `overrides` the one of the command line's `--set`, for `config` the one of `checked`.
    """
    changed = [f"training.{name}={value}" for name, value in training.items() if value]
    return checked(form, settings(form, config, preset, where, [*changed, *overrides], cluster))


def settings(
    form: type[Settings], config: Any, preset: Any, where: str, overrides: Iterable[str], cluster: str = ""
) -> Any:
    """The same, not checked as a whole. Raises ValueError for a name of none that is shipped: it is no path to be read."""
    if isinstance(
        preset, Settings | dict
    ):  # retrain("tiny", load("tiny", [])), as it was called before there were presets
        config, preset = preset, ""
    preset, where, changes, value = preset or "", where or "", list(overrides or ()), config or {}
    if not isinstance(value, Settings | dict) or not all(isinstance(one, str) for one in changes):
        raise ValueError(
            f"`config` must hold settings by section, and `overrides` texts of the form A.B=VALUE. {REMEDY}"
        )
    for name, known in ((preset, presets), (where, places)):
        if name and name not in known():
            raise ValueError(
                f"there is no shipped configuration {name!r} for this field: there are {', '.join(known())}"
            )
    block = cluster_block(cluster) if cluster else None
    if isinstance(value, Settings) and not block:
        return with_settings(value.model_dump(mode="json"), changes) if changes else value
    value = value.model_dump(mode="json") if isinstance(value, Settings) else value
    where, of_block = (block.where or where, {"cluster": block.settings}) if block else (where, {})
    if _whole(form, value):  # a run or a schedule of an earlier release, which knew no presets
        section = {"cluster": load_cluster(where, []).model_dump(mode="json")} if where else {}
        return with_settings(_over(form, {**value, **section}, of_block), changes)
    value = _over(form, of_block, value)
    own = parameters_of_deployment() if value or not preset else {}
    if not preset and own.get("preset"):
        return settings(form, value, own["preset"], where, changes)
    sources = [one for one in (preset, where) if one]
    if sources and not (value or own.get("config")):
        return part_of(form, load(sources, changes))
    # The preset may have what this flow's class lacks: `training.model` of a revalidation.
    of_preset = [one for one in changes if sources and one.partition("=")[0].split(".")[0] not in form.model_fields]
    changes = [one for one in changes if one not in of_preset]
    below = part_of(form, load(sources, of_preset)) if sources else {}
    return with_settings(_over(form, _over(form, below, own.get("config") or {}), value), changes)


def of_deployment(form: type[Settings]) -> dict[str, Any]:
    """The configuration that the running flow run's deployment stands for; empty where it has none."""
    own = parameters_of_deployment()
    changes = [f"training.{name}={own[name]}" for name in ("learning_rate", "steps") if own.get(name)]
    names = (own.get("preset", ""), own.get("where", ""))
    overrides = [*changes, *own.get("overrides", ())]
    return dict(settings(form, own.get("config"), *names, overrides, own.get("cluster", ""))) if own else {}


def setting(form: type[Settings], *path: str) -> str:
    """A setting of the running flow run, before anybody checked it; where it cannot be told, the preset's name."""
    given = runtime.get_parameters()
    preset = given.get("preset") or ""
    try:
        names = (preset, given.get("where") or "")
        overrides, cluster = given.get("overrides") or (), given.get("cluster") or ""
        value = settings(form, given.get("config"), *names, overrides, cluster)
    except ValueError:
        return str(preset)
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return str(value or "")


def checked(form: type[C], value: Any) -> C:
    """The configuration of a run as its class. Raises ValueError with each key that does not hold, and the remedy."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        words = explain(error, form)
        raise ValueError(f"the configuration of this run does not fit this Headway: {words}. {REMEDY}") from None


def resolve(name: str) -> Dataset:
    """The dataset of a reference: NAME or dataset/NAME@VERSION; the run is about it. Raises Unknown."""
    (dataset,) = datasets((name,))
    current().result = replace(current().result, dataset=dataset.ref)
    return dataset


def datasets(names: Iterable[str]) -> tuple[Dataset, ...]:
    """The datasets of some references. Raises Unknown."""
    store = current().store
    result = (pinned(store, name, kind="dataset") for name in names)
    return tuple(Dataset(name=m.provenance.name, version=m.version, uri=store.uri_of(m)) for m in result)


def indices(names: Iterable[str], dataset: Dataset) -> tuple[Index, ...]:
    """The indices of earlier corpora. Raises Unknown for one that there is not, ValueError for one of the dataset itself."""
    store = current().store
    made = []
    for name in names:
        try:
            manifest = pinned(store, name, kind="index")
        except Unknown as error:
            remedy = "Validate that corpus with validation.index=true, which publishes it, or take it out of validation.against."
            raise Unknown(f"validation.against: {error.message}", remedy=f"{remedy} {error.remedy}") from error
        if dataset.ref in manifest.provenance.inputs:
            raise ValueError(
                f"validation.against names {manifest.ref}, which was made of {dataset.ref} itself: every document would repeat "
                "itself; name indices of other corpora"
            )
        made.append(Index(name=manifest.provenance.name, version=manifest.version, uri=store.uri_of(manifest)))
    return tuple(made)


def accepted_before(dataset: Dataset) -> Validation | None:
    """The newest verdict that accepted a version of the dataset which was published before this one; None for the first."""
    store = current().store
    published = find(store, *parse_ref(dataset.ref)).provenance.created
    for manifest in store.manifests("validation", dataset.name):
        judged = next(iter(manifest.provenance.inputs), "")
        earlier = judged not in ("", dataset.ref) and _created(store, judged) < published
        if earlier and (result := _accepted(store, manifest)):
            return result
    return None


def _created(store: Store, ref: str) -> str:
    """When an artifact was published; what is gone was published after all others."""
    try:
        return find(store, *parse_ref(ref)).provenance.created
    except Unknown:
        return "gone"


def _accepted(store: Store, manifest: Manifest) -> Validation | None:
    """A verdict as it was given, if the gate was open and it holds what drift is measured against."""
    if not any(file.path == "columns.json" for file in manifest.content.files):
        return None
    payload = json.loads((store.fetch(manifest) / "validation.json").read_text(encoding="utf-8"))
    if not payload["passed"]:
        return None
    checks = tuple(Check.model_validate(each) for each in payload["checks"])
    subject = find(store, *parse_ref(payload["accepted"]))
    return Validation(
        name=manifest.provenance.name,
        version=manifest.version,
        uri=store.uri_of(manifest),
        metrics=manifest.provenance.metrics,
        checks=checks,
        subject=Dataset(name=subject.provenance.name, version=subject.version, uri=store.uri_of(subject)),
    )


def _whole(form: type[Settings], value: dict[str, Any]) -> bool:
    """Whether a value names every setting of its class, section by section; but those that are written only with another value
    than their default."""
    return all(
        _whole(section, value[name]) if section and isinstance(value.get(name), dict) else name in value
        for name, section in _sections(form).items()
        if name in value or form.model_fields[name].exclude_if is None
    )


def _over(form: type[Settings], below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The settings of both; where both name a section its settings are merged, anything else, maps too, is that of `above`."""
    both = {
        name: _over(section, below[name], above[name])
        for name, section in _sections(form).items()
        if section is not None and isinstance(below.get(name), dict) and isinstance(above.get(name), dict)
    }
    return {**below, **above, **both}


def _sections(form: type[Settings]) -> dict[str, type[Settings] | None]:
    """Each setting of a class, with the class of what is a section."""
    result = {}
    for name, field in form.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        result[name] = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)), None)
    return result
