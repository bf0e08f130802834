"""Answers that hang together change sides together: bursts, callers and the hour are no anomaly, and shifts are found."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers, every

from benchmarks.operating_characteristics import watch
from tasks.config.revalidation import ServiceConfig
from tasks.formats.answers import Label
from tasks.serving.monitor.anomalies import compare
from tasks.serving.monitor.blocks import DAY, Run, accuracy_column, block_length, cut, orders, same_time_of_day
from tasks.serving.monitor.watch import Followed, next_followed

pytestmark = pytest.mark.unit

CONFIG = ServiceConfig()


def verdicts(told):
    return {column["name"]: column["verdict"] for column in told["columns"]}


def one_run(count):
    return [Run(np.arange(count), False, 0)]


def test_blocks_are_single_answers_where_these_are_independent_and_several_bursts_where_they_are_not():
    chance = np.random.default_rng(1)
    lengths = [block_length(chance.random(800), one_run(800), stretch=200) for _ in range(100)]
    assert lengths.count(1) >= 95
    for burst in (5, 20):
        alike = np.repeat(chance.random(800 // burst), burst)
        assert block_length(alike, one_run(800), stretch=200) >= 2 * burst
    assert block_length(np.zeros(800), one_run(800), stretch=200) == 1


def test_blocks_change_sides_whole_and_within_a_caller():
    by_time, by_caller = orders(["a"] * 40 + ["b"] * 40, ["a"] * 20 + ["c"] * 7)
    assert [len(run.rows) for run in by_time] == [80, 27] and len(orders(["a"] * 9, ["a"] * 3)) == 1
    blocks = cut(by_caller, 10)
    assert blocks.possible() == 15 * 2  # two of six blocks of a; b or c, each a block
    drawn = blocks.drawn(splits=50, seed=1)
    assert drawn.shape == (51, 107) and drawn[0].tolist() == [0.0] * 80 + [1.0] * 27
    for row in drawn:
        assert row[:40].sum() + row[80:100].sum() == 20  # of a
        assert row[40:80].sum() in (0, 40) and row[100:].sum() in (0, 7)
        for block in range(len(blocks.new)):
            assert len(set(row[blocks.of == block])) == 1


def test_a_reference_is_of_the_windows_time_of_day_and_of_more_hours_where_it_is_short():
    times = np.arange(0.0, 3 * DAY, 600.0)
    chosen = times[same_time_of_day(times, 3 * DAY - 900.0, 3 * DAY + 300.0, fewest=10)]
    assert {round(time % DAY) for time in chosen} == {*range(84_000, 86_400, 600), *range(0, 2_400, 600)}
    assert same_time_of_day(times, 3 * DAY, 3 * DAY + 1, fewest=100).sum() >= 100
    assert same_time_of_day(times, 3 * DAY, 3 * DAY + 1, fewest=10**6).all()
    assert same_time_of_day(times, 3 * DAY, 5 * DAY, fewest=1).all()


@pytest.mark.parametrize(
    "traffic",
    [watch.BURSTS[5], *(pytest.param(one, marks=pytest.mark.long) for one in (watch.BURSTS[1], watch.BURSTS[3]))],
    ids=lambda one: one.name,
)
def test_answers_in_bursts_that_are_alike_are_no_anomaly(traffic):
    assert sum(watch.stands_out(seed, traffic, watch.NOTHING) for seed in range(2)) == 0


def test_labels_in_bursts_that_are_alike_are_no_loss():
    """At half a per cent a perfect judge gives more than 2 of 60 once in 300 times."""
    assert sum(watch.loses_accuracy(seed, 20, 0.9) for seed in range(60)) <= 2
    assert sum(watch.loses_accuracy(seed, 5, 0.4) for seed in range(10)) >= 7


def test_the_hour_of_the_day_is_no_anomaly_and_what_is_planted_in_it_is():
    assert sum(watch.stands_out(seed, watch.CYCLE, watch.NOTHING) for seed in range(4)) == 0
    assert watch.stands_out(1, watch.CYCLE, watch.SHIFTS[0]) and watch.stands_out(2, watch.CYCLE, watch.SHIFTS[3])


def mixed(count, *, seed, share, begins=0.0):
    """Answers of two callers, of which one asks for short ones."""
    short = np.random.default_rng([seed, 1]).random(count) < share
    made = answers(count, seed=seed, begins=begins)
    return [
        replace(a, caller="b", completion_tokens=4, finish_reason="stop", repetition=None)
        if one
        else replace(a, caller="a")
        for a, one in zip(made, short, strict=True)
    ]


def test_another_mix_of_callers_is_no_anomaly_and_other_answers_to_one_of_them_are():
    before, window = mixed(800, seed=1, share=0.3), mixed(200, seed=2, share=0.7, begins=900.0)
    assert compare(before, window, CONFIG)["verdict"] == "none"
    looping = [replace(a, repetition=0.9) if a.caller == "a" else a for a in window]
    assert verdicts(compare(before, looping, CONFIG))["repetition"] == "anomaly"


def test_a_window_of_one_new_caller_cannot_be_judged():
    window = [replace(a, caller="c", repetition=0.9) for a in answers(200, seed=2, begins=900.0)]
    told = compare(mixed(800, seed=1, share=0.3), window, CONFIG)
    assert told["verdict"] == "insufficient" and set(verdicts(told).values()) == {"insufficient"}


def test_an_anomaly_that_begins_within_a_window_is_found():
    window = answers(200, seed=2, begins=900.0)
    late = [*window[:100], *every(1, window[100:], lambda a: replace(a, repetition=0.9))]
    assert verdicts(compare(answers(800, seed=1), late, CONFIG))["repetition"] == "anomaly"


def test_a_window_of_few_bursts_goes_on_until_it_is_as_long_as_its_reference():
    told = {"verdict": "insufficient", "against": "answers", "requests": 100, "reference_requests": 800, "columns": []}
    known = Followed("model/tiny@1", 10.0)
    assert next_followed(known, told, CONFIG, now=20.0)[0].since == 10.0
    assert next_followed(known, {**told, "requests": 800}, CONFIG, now=20.0)[0].since == 20.0


def test_labels_of_one_new_caller_are_insufficient():
    def said(count, caller, right, begins):
        return [Label(begins + n, f"{caller}{n}", begins + n, float(right(n)), caller=caller) for n in range(count)]

    before = said(100, "a", lambda n: n % 10 > 0, 0.0)
    assert accuracy_column(before, said(40, "b", lambda n: False, 100.0), CONFIG)["verdict"] == "insufficient"
    assert accuracy_column(before, said(40, "a", lambda n: False, 100.0), CONFIG)["verdict"] == "anomaly"


def rate_of(line):
    """The share that was found, and the one that is stated."""
    return int(line.measured.split()[0]), float(line.stated.split(" %")[0].split()[-1]) / 100


@pytest.mark.integration
@pytest.mark.long
def test_operating_characteristics_of_the_watch_are_rows():
    lines = list(watch.rows(quick=True))
    assert {line.judgement for line in lines} == {"watch", "watch, labels"}
    for line in lines:
        found, stated = rate_of(line)
        assert found <= max(1, 3 * stated * line.trials) if "<=" in line.stated else found >= 1, line


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_watch_is_wrong_no_more_often_than_stated():
    """Three standard errors and one beside what is stated."""
    for line in watch.rows(quick=False):
        if line.judgement == "watch, events":
            assert int(line.measured.split()[0]) <= 1, line
            continue
        found, stated = rate_of(line)
        room = 1 + 3 * (stated * (1 - stated) * line.trials) ** 0.5
        kept = found <= stated * line.trials + room if "<=" in line.stated else found >= stated * line.trials - room
        assert kept, line
