"""Model -> Integrity: every byte and the signature of a champion, where it is stored and where it serves.

What is compared, and what is done about changed files, is tasks/registry/model_integrity.py, which the watch uses as well. A
result holds for the moment: it is never reused.
"""

from __future__ import annotations

from typing import Any

from tasks.artifacts import Check, Model, Value, parse_ref
from tasks.common.errors import HeadwayError, IntegrityError
from tasks.config.revalidation import IntegrityConfig
from tasks.orchestration.run import current
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import home_folder
from tasks.registry.model_integrity import STORE, Finding, act_on, findings, take_out_of_service, told
from tasks.security.signatures import remedy_for
from tasks.serving.endpoint import ServedFrom
from tasks.serving.known import endpoint_of, known_endpoints
from tasks.storage.manifest import remake
from tasks.storage.store import find

SOURCE = "headway/revalidate"


class Integrity(Value):
    """Whether a model is what was signed, everywhere."""

    model: str
    checks: tuple[Check, ...]
    problems: tuple[dict[str, Any], ...] = ()
    """Each file that is not as it was signed, and where."""
    said: str
    remedy: str = ""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def require(self) -> None:
        """Raise IntegrityError when something is not what was signed."""
        if not self.passed:
            raise IntegrityError(f"{self.model}: {self.said}", problems=list(self.problems), remedy=self.remedy)


@stage(version=1, expires=lambda record, arguments: True)
def integrity(model: Model, config: IntegrityConfig) -> Integrity:
    """Compare all bytes; say `model.tampered` and stop what serves from changed files when they differ, and do not raise."""
    serving = served(model.name)
    others = {each.model_ref for each in serving.values()} - {model.ref}
    result = {ref: _look(ref, config) for ref in (model.ref, *sorted(others))}
    wrong = [finding for each in result.values() for finding in each]
    remedy = _remedy(model.ref, wrong)
    checks = [_stored(ref, each, remedy) for ref, each in result.items()]
    changed = {finding.where for finding in wrong} - {STORE}
    for where in sorted(changed | {f"endpoint/{name}" for name in serving}):
        checks.append(_check(f"files that {where} serves from", where not in changed, remedy))
    warnings = (check for name, each in serving.items() for check in _another(name, each, model))
    return Integrity(
        model=model.ref,
        checks=(*checks, *warnings),
        problems=tuple(finding.model_dump(mode="json") for finding in wrong),
        said=f"not what was signed: {told(wrong)}" if wrong else _sound(list(serving)),
        remedy=remedy,
    )


def served(model: str) -> dict[str, ServedFrom]:
    """The endpoints that serve any version of a model now."""
    home = home_folder("")
    result = {name: endpoint_of(home, name).serves_from() for name in known_endpoints(home)}
    return {
        name: each
        for name, each in result.items()
        if each and each.running and parse_ref(each.model_ref)[:2] == ("model", model)
    }


def _look(ref: str, config: IntegrityConfig) -> list[Finding]:
    """What is wrong with one version, told and acted on."""
    home, store = home_folder(""), current().store
    result = findings(home, store, ref)
    act_on(home, store, ref, result, source=SOURCE)
    if config.stop_endpoints:  # also where the settings that the model was made with leave them running
        for finding in result:
            if finding.where != STORE:
                reason = f"its files are not what was signed: {told(result)}"
                take_out_of_service(home, store, finding.where.removeprefix("endpoint/"), reason=reason, serving=ref)
    return result


def _stored(ref: str, results: list[Finding], remedy: str) -> Check:
    local = [finding for finding in results if finding.where == STORE]
    wrong = "the key does not count" if any(finding.untrusted for finding in local) else "changed"
    return _check(f"files and signature of {ref[:-52]} where it is stored", not local, remedy, wrong=wrong)


def _check(name: str, passed: bool, remedy: str, *, wrong: str = "changed") -> Check:
    measured = "as signed" if passed else wrong
    return Check(name=name, measured=measured, limit="as signed", passed=passed, remedy="" if passed else remedy)


def _another(endpoint: str, serving: ServedFrom, model: Model) -> list[Check]:
    """A warning where an endpoint serves another version than the champion: after a rollback, until the next deploy."""
    if serving.model_ref == model.ref:
        return []
    name, short = f"endpoint/{endpoint} serves the champion", serving.model_ref[:-52]
    return [Check(name=name, measured=short, limit=model.ref[:-52], passed=True, warned=True)]


def _sound(endpoints: list[str]) -> str:
    where = ", ".join(f"endpoint/{name}" for name in endpoints)
    return "every byte is as it was signed, where it is stored" + (f" and where it serves: {where}" if where else "")


def _remedy(ref: str, wrong: list[Finding]) -> str:
    if not wrong:
        return ""
    if all(problem.problem == "signature" for finding in wrong for problem in finding.problems):
        return remedy_for(ref)
    try:
        return f"It must not be served until it is repaired. {remake(find(current().store, *parse_ref(ref)))}"
    except (HeadwayError, ValueError):
        return "It must not be served until it is repaired. `headway restore` brings it back from a backup."
