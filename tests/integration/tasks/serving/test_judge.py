"""The judge of a rollout, and the steps that follow from it: seen requests in, outcomes out. No process and no sleep."""

import random

import pytest

from benchmarks.operating_characteristics.canary import FAULTS, SAME, ends
from tasks.common.errors import GateFailed
from tasks.config.serving import RolloutConfig
from tasks.serving.azureml.probes import Probed, together
from tasks.serving.journal import Journal
from tasks.serving.protocol.judge import (
    FALSE_ALARM,
    OF_ANSWERS,
    OF_ERRORS,
    OF_TIMES,
    Judge,
    Seen,
    SequentialTest,
    distance,
    error_test,
    late,
)
from tasks.serving.rollout import compared_in, roll_out, steps_of

pytestmark = pytest.mark.unit

AT_ONCE = RolloutConfig(step_requests=0, step_seconds=0)
STEPS = RolloutConfig(step_requests=50, least_seconds=5, step_seconds=30, hold_seconds=100)
SEED = 20


def seen(requests=200, failures=0, pace=0.01, first=0.0, **measures):
    count = requests - failures
    times = {"seconds_per_token": [pace] * count, "first_token": [first] * count if first else ()}
    return Seen(requests, failures, **times, measures={name: [value] * requests for name, value in measures.items()})


def names(verdict):
    return [check["name"] for check in verdict.checks]


@pytest.mark.parametrize(
    ("green", "blue", "broken"),
    [
        (seen(), seen(), []),
        (seen(10, failures=2), seen(), []),
        (seen(3, failures=3), seen(), ["errors"]),
        (seen(1000, failures=20), seen(), []),
        (seen(1000, failures=45), seen(), ["errors"]),
        (seen(pace=0.016), seen(), ["median of the time a token", "95th percentile of the time a token"]),
        (seen(pace=0.014), seen(), []),
        (seen(pace=0.016), seen(99), []),  # too few to tell
        (
            seen(first=0.4),
            seen(first=0.25),
            ["median of the time to the first token", "95th percentile of the time to the first token"],
        ),
        (seen(odd=0.9), seen(odd=0.0), ["odd of answers"]),
        (seen(20, odd=0.9), seen(20, odd=0.0), []),
        (seen(odd=0.9), seen(0), []),
        (Seen(trip="it failed"), seen(), ["traffic"]),
        (Seen(probes=20, probe_failures=10), seen(), ["errors of our own requests"]),
    ],
)
def test_a_breach_is_told_at_once(green, blue, broken):
    verdict = Judge(AT_ONCE).look(green, blue, waited=0)
    assert ((verdict.outcome == "back"), names(verdict) if broken else []) == (bool(broken), broken)


def test_a_reference_stands_in_for_answers_of_the_old_model_but_not_where_prompts_decide():
    kept = {"odd": [0.0, 0.01, 0.02] * 10, "length": [60.0, 64.0] * 20}
    verdict = Judge(AT_ONCE, reference=kept).look(seen(odd=0.9, length=4), seen(0), waited=0)
    assert names(verdict) == ["odd of answers"]


def test_a_step_needs_its_requests_and_its_time_and_is_not_judged_without():
    def outcome(green, waited, config=STEPS):
        verdict = Judge(config).look(green, seen(), waited=waited)
        return verdict.outcome, names(verdict)

    assert outcome(seen(49), 29) == ("wait", ["evidence"])
    assert outcome(seen(50), 4) == ("wait", ["duration"])
    assert outcome(seen(50), 5) == ("passed", [])
    assert outcome(seen(49), 30) == ("not judged", ["evidence"])
    assert outcome(Seen(), 30)[0] == "not judged", "nobody asks anything: that is no evidence"
    assert outcome(seen(5), 0, AT_ONCE)[0] == "not judged"
    by_time = RolloutConfig(step_requests=0, step_seconds=30)
    assert [outcome(seen(200), waited, by_time)[0] for waited in (29, 30)] == ["wait", "passed"]


def test_the_last_step_needs_an_answer_of_each_test():
    judge = Judge(STEPS)
    assert names(judge.look(seen(60), seen(), waited=30, last=True)) == ["errors"]
    assert judge.look(seen(160), seen(), waited=31, last=True).outcome == "passed"
    assert "the time a token" in names(Judge(STEPS).look(seen(160), seen(99), waited=31, last=True))
    open_ = Judge(STEPS).look(seen(160, pace=0.016), seen(0), waited=31, last=True)
    assert open_.outcome == "not judged"


def test_times_are_known_before_the_old_model_has_no_traffic_to_compare_with():
    """A machine that becomes slow in the last step is slow for both; one that breaks down there is not."""
    judge = Judge(STEPS)
    assert "the time a token" in names(judge.look(seen(160), seen(99), waited=31, times=True))
    assert judge.look(seen(160), seen(), waited=31, times=True).outcome == "passed"
    judge.begin_step()
    assert judge.look(seen(160, pace=0.025), seen(), waited=31, last=True, times=False).outcome == "passed"
    judge.begin_step()
    assert judge.look(seen(160, pace=0.035), seen(), waited=31, last=True, times=False).outcome == "back"
    config = {"mirror": 10, "steps": (10, 100)}
    assert compared_in(list(steps_of(RolloutConfig(**config)))) == 1
    assert compared_in(list(steps_of(RolloutConfig(**config | {"steps": (100,)})))) == 1
    assert compared_in(list(steps_of(RolloutConfig(mirror=0, steps=(100,))))) == 0


def test_failures_add_up_over_the_steps():
    judge, outcomes = Judge(STEPS), []
    for _ in range(4):
        judge.begin_step()
        outcomes.append(judge.look(seen(50, failures=4), seen(), waited=5).outcome)
    assert outcomes[0] == "passed" and outcomes[-1] == "back"


def test_a_model_that_breaks_after_many_good_answers_is_found_as_soon():
    test = error_test(0.02)
    assert test.add(10_000, 0) == "sound"
    for _ in range(100):
        test.add(500, 0)
    needed = next(count for count in range(1, 50) if test.add(1, 1) == "bad")
    assert needed <= 5


def test_requests_that_hang_count_as_soon_as_they_are_late():
    """A judge that waits for their end knows nothing for nine tenths of request_seconds."""
    blue = Seen(requests=200, longest_wait=1.0)
    assert late([1.9, 2.1, 30.0], longest=1.0, requests=200) == 2
    assert late([30.0], longest=1.0, requests=99) == 0, "too little is known of the old model"
    verdict = Judge(STEPS).look(Seen(requests=2, waiting=[2.5] * 4), blue, waited=3)
    assert verdict.outcome == "back" and "4 under way are late" in verdict.checks[0]["measured"]
    assert Judge(STEPS).look(Seen(requests=2, waiting=[1.5] * 4), blue, waited=3).outcome == "wait"


class Port:
    """A TrafficPort that shows what a function of the seconds since the share was set says."""

    def __init__(self, shows):
        self.shows, self.now, self.began, self.shares = shows, 0.0, 0.0, []

    def set_traffic(self, weights, *, mirror=0):
        self.began = self.now
        self.shares.append(weights["green"])

    def observe(self):
        return {"green": self.shows(self.now - self.began), "blue": seen()}

    def asked_back(self):
        return ""

    def promote(self):
        self.shares.append("promoted")

    def withdraw(self):
        self.shares.append("withdrawn")

    def pause(self, seconds):
        self.now += max(seconds, 1.0)

    def roll_out(self, folder, config=STEPS, report=lambda event, details: None):
        journal = Journal(folder / "journal.jsonl")
        journal.begin(what="deploy")
        roll_out(self, config, journal, report=report, pause=self.pause, clock=lambda: self.now)
        return journal.last_change()


def test_without_evidence_a_rollout_holds_and_then_ends_not_judged(tmp_path):
    port, told = Port(lambda seconds: Seen()), []
    with pytest.raises(GateFailed, match="was not judged at the step 10 %") as ended:
        port.roll_out(tmp_path, report=lambda event, details: told.append(event))
    assert ended.value.checks[0]["name"] == "evidence" and "rollout.step_requests" in ended.value.remedy
    assert port.shares == [0, 10, 0, "withdrawn"] and told == ["step", "step", "holding"]
    assert port.now >= 30 + 130


def test_a_step_that_holds_goes_on_when_the_evidence_comes(tmp_path):
    port = Port(lambda seconds: seen(60) if seconds > 60 else Seen())
    change = port.roll_out(tmp_path)
    assert port.shares == [0, 10, 50, 100, 100, "promoted"]
    assert change.last("commit")["outcomes"] == {
        "mirror": "not judged", "10 %": "passed", "50 %": "passed", "100 %": "passed"
    }  # fmt: skip


def test_steps_without_requests_end_by_their_time_and_say_that_they_were_not_judged(tmp_path):
    port = Port(lambda seconds: Seen())
    change = port.roll_out(tmp_path, RolloutConfig(step_requests=0, step_seconds=30))
    assert port.shares[-1] == "promoted" and set(change.last("commit")["outcomes"].values()) == {"not judged"}
    assert port.now >= 120


def test_a_model_that_fails_every_request_at_low_traffic_is_not_promoted(tmp_path):
    """Two failures a step, and the steps end by their time: each for itself says little."""
    port = Port(lambda seconds: seen(2, failures=2) if seconds > 20 else Seen())
    with pytest.raises(GateFailed, match="errors: 4 of 4 requests failed"):
        port.roll_out(tmp_path, RolloutConfig(step_requests=0, step_seconds=30))


def test_our_own_probes_never_advance_a_step(tmp_path):
    """Azure Monitor is silent, half of the callers' requests fail, and our own requests are all answered."""

    def silent(seconds):
        answered = int(4 * seconds)
        return together(Probed(requests=answered, seconds_per_token=[0.01] * answered), None)

    port = Port(silent)
    with pytest.raises(GateFailed, match="was not judged at the step 10 %"):
        port.roll_out(tmp_path)
    assert port.shares == [0, 10, 0, "withdrawn"]

    def late_counts(seconds):
        counted = {"requests": 40, "failures": 20} if seconds > 60 else None
        return together(Probed(requests=int(4 * seconds)), counted)

    with pytest.raises(GateFailed, match="errors: 20 of 40 requests failed"):
        Port(late_counts).roll_out(tmp_path)


def test_the_counts_of_azure_monitor_advance_the_steps(tmp_path):
    def counted(seconds):
        answered = int(4 * seconds)
        counts = {"requests": 60, "failures": 0} if seconds > 60 else None
        return together(Probed(requests=answered, seconds_per_token=[0.01] * answered), counts)

    port = Port(counted)
    change = port.roll_out(tmp_path)
    assert port.shares[-1] == "promoted" and port.now > 3 * 60
    assert change.last("commit")["outcomes"]["100 %"] == "passed"


def test_the_parts_of_the_alpha_are_the_whole():
    assert pytest.approx(FALSE_ALARM) == 2 * OF_ERRORS + 4 * OF_TIMES + OF_ANSWERS


@pytest.mark.parametrize(("share", "worst"), [(0.0, 0.01), (0.02, 0.04), (0.5, 0.75), (1.0, 1.0)])
def test_any_limit_of_failures_can_be_tested(share, worst):
    test = error_test(share)
    assert (test.share, test.worst) == (share, worst)
    assert test.add(2000, 0) == "sound"
    assert test.add(40, 40) == ("bad" if share < 1 else "sound")


def test_a_limit_that_is_badly_known_condemns_nobody():
    """The 95th percentile of 100 answers may lie at the 90th: Fisher's or a binomial test would condemn a twin for it."""
    dice, condemned = random.Random(SEED), 0
    for _ in range(100):
        old = sorted(dice.lognormvariate(0, 2) for _ in range(100))
        test = SequentialTest(0.05, 0.15, 0.01, 0.01)
        beyond = [dice.lognormvariate(0, 2) > old[95] for _ in range(500)]
        condemned += any(test.add(1, one, answers=100) == "bad" for one in beyond)
    assert condemned <= 2


def test_distances_by_hand():
    assert distance([1, 2], [3, 4]) == 1 and distance([1, 2], [1, 2]) == 0
    assert distance([1, 2, 3, 4], [1, 2, 9, 9]) == 0.5


@pytest.mark.parametrize("truth", SAME, ids=lambda truth: truth.times.name)
def test_the_same_model_is_promoted_whatever_its_times(truth):
    found = ends(truth, 5.0, trials=8)
    assert sum(one.how != "promoted" for one in found) <= 1


@pytest.mark.parametrize("truth", FAULTS, ids=lambda truth: truth.name)
def test_a_bad_model_is_not_promoted_whatever_the_traffic(truth):
    found = [one for rate in (0.5, 5.0) for one in ends(truth, rate, trials=3)]
    assert sum(one.how == "promoted" for one in found) <= 1


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.1, 0.5, 5.0, 200.0])
def test_the_stated_error_rates_hold(rate):
    for truth in SAME:
        assert sum(one.how != "promoted" for one in ends(truth, rate, trials=100)) <= 3, truth.name
    for truth in FAULTS:
        assert sum(one.how == "promoted" for one in ends(truth, rate, trials=100)) <= 4, truth.name
