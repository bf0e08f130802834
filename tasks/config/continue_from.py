"""Going on from another run's checkpoint: what differs, what of that a person may force, and where the data goes on. Pure.

Who finds the checkpoint and asks is flows/support/continuing.py; who takes it over is tasks/jobs/checkpoint/origins.py. See
docs/training.md, "Go on from another run".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tasks.config.base import Settings
from tasks.config.engines.registry import ENGINES
from tasks.config.training import TrainingConfig

CONTINUES = "continues"
"""Key of a run's identity that says from which checkpoint of which job it went on."""
TOKENS = "tokens"
SHAPE = ("training.network.", "training.lora.rank", "training.lora.targets", "base")
"""Settings that make another network."""
ORDER = (TOKENS, "training.mixture", "training.sequence_length", "training.packing", "training.seed")
"""What the order of samples is made of: a place in one order is no place in another one."""


class ContinueFrom(Settings):
    """A run whose newest good checkpoint training begins with, instead of with fresh weights."""

    job: str = ""
    """Its training job, as `headway jobs --all` shows it, or a job's folder. Empty: training begins anew."""
    force: bool = False
    """Whether it goes on although settings, tokenizer or data changed. It is written to the audit log."""
    reason: str = ""
    """Why; needed with `force`. The same words begin with the same checkpoint again; others choose the newest one anew."""


class Origin(Settings):
    """What a training went on from; it is in the stage's key."""

    job: str
    """Name of the job's folder."""
    step: int
    """Steps that its checkpoint has behind it."""
    sha256: str
    """Of the checkpoint's manifest, in hex."""


class TakeOver(Settings):
    """Where the checkpoint lies and how it is taken over; it follows from the origin and the settings, so it is in no key."""

    folder: str
    """The other job's `checkpoints`."""
    attempt: int
    accepted: tuple[str, ...]
    """Settings that may differ; of the data, `tokens`."""
    consumed_samples: int
    """Where the data goes on: samples of this run's order that count as used."""
    tokens: int
    """Tokens that were trained on before, over all runs."""
    kept_for: str
    """Under which name the checkpoint is kept until it is taken over."""


class Difference(NamedTuple):
    """A setting with its value there, in the checkpoint, and here."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key} is {self.there!r} in the checkpoint, {self.here!r} now"


def differing(result: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """Each setting of two identities that differs. One that the checkpoint's release did not know had its default."""
    theirs, ours = dict(_flat(_known(result))), dict(_flat(wanted))
    keys = sorted(theirs.keys() | ours.keys())
    return [Difference(key, theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)]


def of_another_run(result: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """The same, but for what each of them went on from itself."""
    mine, yours = ({key: part for key, part in each.items() if key != CONTINUES} for each in (result, wanted))
    return differing(mine, yours)


def name_of(key: str) -> str:
    """What a person accepts of a difference: the setting, or all of the tokens at once."""
    return TOKENS if key.split(".")[0] == TOKENS else key


def impossible(differences: Iterable[Difference], config: TrainingConfig, step: int) -> list[str]:
    """Why training cannot go on from a checkpoint, whoever wants it; empty when it can."""
    return [*_by_itself(config, step), *(why for each in differences if (why := _never(each, config)))]


def _by_itself(config: TrainingConfig, step: int) -> Iterator[str]:
    if ENGINES[config.engine].cannot_continue:
        yield (
            f"training.engine {config.engine} reads only what its own loop wrote in the same job folder, and takes the schedule "
            "from there"
        )
    if config.steps <= step:
        yield f"training.steps {config.steps} leaves nothing to do after the checkpoint's step {step}: give more steps"


def _never(each: Difference, config: TrainingConfig) -> str:
    if each.key.startswith(SHAPE):
        return f"another network: {each}"
    if each.key == "training.engine":
        return f"another engine, which cannot read its state: {each}"
    if each.key == "training.sequence_length" and config.network.architecture == "gpt2" and not config.base:
        return f"another network, for gpt2 learns each position: {each}"
    if each.key == "training.precision" and (layout := ENGINES[config.engine].laid_out_by_precision):
        return f"another layout of {layout}: {each}"
    return ""


def position(consumed: int, differences: Iterable[Difference]) -> tuple[int, str]:
    """Samples of the new order that count as used, and why: all that the other run used, unless the order is another one."""
    others = sorted({name_of(each.key) for each in differences if each.key.startswith(ORDER)})
    if others:
        return 0, f"the data starts again at sample 0, because {', '.join(others)} changed"
    return consumed, f"the data continues after its first {consumed} samples"


def tokens_until(identity: Mapping[str, Any], step: int) -> int:
    """Tokens that a run had trained on at a step, with those of the run that it went on from itself."""
    training = TrainingConfig.model_validate(identity["training"])
    before = identity.get(CONTINUES) or {"step": 0, "tokens": 0}
    each = training.global_batch_size * training.sequence_length
    return int(before["tokens"]) + (step - int(before["step"])) * each


def _known(result: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as this release writes it. The release before had `world_size` in it, too."""
    known = {key: value for key, value in result.items() if key != "world_size"}
    try:
        return {**known, "training": TrainingConfig.model_validate(known["training"]).model_dump(mode="json")}
    except (ValueError, KeyError):
        return known


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
