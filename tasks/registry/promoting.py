"""`headway promote` and `headway rollback`: a person makes another version the current one of a name, or the champion.

Who may is asked by the caller, of tasks/security/policy.py; `Step.right` says which right a step of a rollback needs.
Promoting looks, verifies, audits, moves. Verifying takes as long as reading every byte: who promotes another one meanwhile
wins, and this promotion is told. What endpoints serve does not live here. See docs/history.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from tasks.artifacts import parse_ref
from tasks.common.errors import Conflict, IntegrityError
from tasks.registry.refs import champions, move_ref, place_of, read_ref, target_of
from tasks.registry.verification import problems_of, refusal
from tasks.registry.versions import note, past
from tasks.security.audit import audited
from tasks.security.policy import Right
from tasks.storage.history import Change
from tasks.storage.manifest import Manifest
from tasks.storage.store import Document, Store, counts_as_newest, find


class Promotion(NamedTuple):
    """Who is champion now, and who was."""

    model: Manifest
    before: str | None

    @property
    def changed(self) -> bool:
        return self.before != self.model.ref


def would_promote(store: Store, ref: str) -> Promotion:
    """What promoting a reference would do. Raises Unknown, and ValueError for what is no model."""
    kind, name, version = parse_ref(ref, kind="" if "/" in ref else "model")
    if kind != "model":
        raise ValueError(f"{ref} is no model: only models have a champion; `headway models` lists them")
    model = find(store, kind, name, version)
    return Promotion(model, read_ref(store, f"{name}/champion"))


def promote(
    store: Store,
    ref: str,
    *,
    keys: Path,
    reason: str,
    when_champion: Callable[[Manifest], None] = lambda manifest: None,
) -> Promotion:
    """Make a model version the champion. `when_champion` is called after that: MLflow is to be told, after a kill too.

    Raises IntegrityError for one that is damaged, unsigned, or signed by a key that is not trusted or revoked; Conflict when
    another one was promoted since this began.
    """
    model = would_promote(store, ref).model
    name = f"{model.provenance.name}/champion"
    start = place_of(store, name)
    _, problems = problems_of(store, model.ref, keys=keys)
    if problems:
        why = refusal(model, problems)
        raise IntegrityError(f"it is not promoted: {why.message}", problems=why.problems, remedy=why.remedy)
    before = move_ref(store, name, model.ref, inputs=model.provenance.inputs, reason=reason, start=start)
    when_champion(model)
    return Promotion(model, before)


def compared_with(
    store: Store, ref: str, *, seen: Document | Literal["now"] | None
) -> Document | Literal["now"] | None:
    """Where `move_ref` must find the champion's ref to make a model the champion that was compared with the one at `seen`.

    Raises Conflict when another model became the champion meanwhile: this one has not proven itself against that.
    """
    name = f"{parse_ref(ref)[1]}/champion"
    now, champion = place_of(store, name), read_ref(store, name)
    if seen == "now" or champion == ref:
        return "now"
    if (now and now.etag) != (seen and seen.etag) and champion != target_of(seen):
        raise Conflict(
            f"{champion} became the champion after {ref} was compared, and stays",
            remedy="The same command again compares with the new champion, and reuses the rest.",
        )
    return now


# A rollback makes an old version of a name current again without moving its bytes. The order is verify, audit,
# promote, champion, history: the history entry makes the version current, so it comes last. A process killed before
# that has changed nothing that a name means, and the same command repeats it all; a kill after the audit entry leaves
# an entry without its change, never a change without its entry. See docs/history.md.


class Step(BaseModel):
    """A way back."""

    model_config = ConfigDict(frozen=True)

    before: Manifest
    """What is current."""
    after: Manifest
    """What becomes current; the same, when there is nothing to do."""
    champion: str | None
    """What the model's champion ref points to; None for other kinds."""
    place: Document | None = None
    """Where that ref stood when this was decided."""
    champions: frozenset[str] = frozenset()
    """Every version of the model that was champion."""

    @property
    def needed(self) -> bool:
        return self.before.version != self.after.version

    @property
    def moves_champion(self) -> bool:
        """Whether the champion is what is rolled back from."""
        return self.needed and self.champion == self.before.ref

    @property
    def right(self) -> Right:
        """What it takes: a model that never was champion becomes it by who may promote, not by who may take one away."""
        return "promote" if self.moves_champion and self.after.ref not in self.champions else "roll_back"

    @property
    def name(self) -> str:
        return self.before.ref.partition("@")[0]


def way_back(store: Store, ref: str, *, to: str = "") -> Step:
    """From the current version of KIND/NAME to another one: `to`, or what stood before it; of a champion, the champion before.

    Raises ValueError for an endpoint, for a reference with a version and for a version that a name never means; Unknown when
    there is no such version, or none before.
    """
    kind, name, version = parse_ref(ref)
    if kind == "endpoint":
        raise ValueError(
            f"{ref} is no artifact: `headway rollback endpoint/NAME` gives its traffic to the model before; "
            "`headway rollback model/NAME` moves the champion"
        )
    if version:
        raise ValueError(f"{ref} names a version: say `headway rollback {kind}/{name} --to {version}`")
    place = place_of(store, f"{name}/champion")  # read first: a move between the two is a Conflict, never unseen
    champion = target_of(place) if kind == "model" else None
    were = frozenset(champions(store, name)) if kind == "model" else frozenset()
    now = find(store, kind, name)
    among = were if now.ref in were else frozenset()
    target = find(store, *parse_ref(f"{kind}/{name}@{to}")) if to else _stood_before(store, now, among)
    if not counts_as_newest(target):
        raise ValueError(
            f"{target.ref} is what validation left of a version, and never what the name means; name the version itself"
        )
    if kind != "model":
        return Step(before=now, after=target, champion=None)
    return Step(before=now, after=target, champion=champion, place=place, champions=were)


def require_sound(store: Store, step: Step, *, keys: Path) -> None:
    """Raise IntegrityError unless every byte of the version is as published, and a signature that there must be counts."""
    _, problems = problems_of(store, step.after.ref, keys=keys)
    if problems:
        why = refusal(step.after, problems)
        raise IntegrityError(
            f"it does not become current: {why.message}",
            problems=why.problems,
            remedy=f"{why.remedy} Or name another version with --to: `headway artifacts {step.name} --history`.",
        )


def roll_back(
    store: Store,
    step: Step,
    *,
    keys: Path,
    reason: str,
    when_champion: Callable[[Manifest], None] = lambda manifest: None,
) -> Change:
    """Go the way back. `when_champion` is called when a model has become the champion again: MLflow is to be told.

    Raises IntegrityError for a damaged or unsigned version, and Conflict when the name, or the champion, moved meanwhile.
    """
    kind, name = step.after.content.kind, step.after.provenance.name
    require_sound(store, step, keys=keys)
    output = {"before": step.before.version, "after": step.after.version, "reason": reason}
    with audited(store, "rollback", right=step.right, what=step.after.ref, **output) as entry:
        store.promote(step.after)
        _require_unmoved(store, step)
        # What a rollback that was killed moved already is not moved again, but told again.
        if step.champion in (step.before.ref, step.after.ref):
            inputs = step.after.provenance.inputs
            done = read_ref(store, f"{name}/champion") == step.after.ref
            move_ref(
                store,
                f"{name}/champion",
                step.after.ref,
                inputs=inputs,
                reason=reason,
                back=True,
                start="now" if done else step.place,
            )
            when_champion(step.after)
        return note(store, kind, name, action="rollback", version=step.after.version, reason=reason, **entry.noted)


def _stood_before(store: Store, now: Manifest, champions: frozenset[str]) -> Manifest:
    """The version that stood before; of `champions`, where there are some, for what was exported meanwhile was not promoted."""
    kind, name = now.content.kind, now.provenance.name
    known = past(store, kind, name)
    among = [parse_ref(ref)[2] for ref in champions]
    before = known.before(now.version, among=among) or known.before(now.version)
    if before is None:
        raise ValueError(
            f"nothing stood before {now.ref}: name the version to go to with --to; `headway artifacts {kind}/{name} "
            "--history` lists them"
        )
    return before


def _require_unmoved(store: Store, step: Step) -> None:
    """Promoting may take minutes: what somebody published meanwhile is not rolled back unseen."""
    now = find(store, step.before.content.kind, step.before.provenance.name)
    if now.version != step.before.version:
        raise Conflict(
            f"{now.ref} became current meanwhile, and stays current",
            remedy="Look at it; the same command again rolls it back as well.",
        )
    if step.champion not in (step.before.ref, step.after.ref):
        return
    champion = read_ref(store, f"{step.before.provenance.name}/champion")
    if champion not in (step.champion, step.after.ref):
        raise Conflict(
            f"{champion} became the champion meanwhile, and stays the champion",
            remedy=f"`headway audit-log --what refs/{step.before.provenance.name}/champion` says who and why.",
        )
