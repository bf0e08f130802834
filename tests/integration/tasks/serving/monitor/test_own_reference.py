"""A model's own `reference.json` is as large as the export made it: it judges windows, and gives no more alarms for that."""

import os
import time
from dataclasses import replace

import pytest
from answers import answers, every
from watched import Watched

from tasks.common.process import write_json
from tasks.config.revalidation import ServiceConfig
from tasks.formats.model_folder import FEWEST, FILE, summary
from tasks.serving.monitor.anomalies import anomalies, answers_of_reference, compare
from tasks.serving.monitor.watch import Followed, look, next_followed

CONFIG = ServiceConfig()
ALWAYS = ServiceConfig(reference="model")
PROMPTS = 37
"""Answers that an export measured: fewer than `min_requests`."""


def write_reference(folder, prompts, *, seed):
    """What an export would have written of so many answers like those of the endpoint."""
    made = answers(prompts, seed=seed)
    measured = {"entropy": [a.entropy for a in made], "odd": [a.odd for a in made]}
    write_json(folder / FILE, summary(measured, prompts=prompts, max_tokens=24))
    return folder


def unsure(answer):
    return replace(answer, entropy=answer.entropy + 1)


@pytest.fixture
def watched(tmp_path):
    """An endpoint whose model brings a small reference, looked at once."""
    made = Watched(tmp_path)
    server = tmp_path / "endpoints" / "api" / "servers" / "s"
    folder = write_reference(tmp_path / "model", PROMPTS, seed=5)
    write_json(server / "serve.json", {"model_folder": str(folder), "files": []})
    seen(made)
    return made


def seen(watched):
    (one,) = look(watched.home, time.time())
    return one


def test_a_model_that_is_odd_from_its_first_answer_on_is_said_though_its_reference_is_small(watched):
    watched.write(100, unsure)
    first = seen(watched)
    assert (first.told["against"], first.told["reference_requests"], first.told["verdict"]) == (
        "model", PROMPTS, "anomaly",
    )  # fmt: skip
    assert first.said == ()
    watched.write(100, unsure)
    assert seen(watched).said == ("entropy",)


def test_a_sound_model_is_judged_by_its_first_window_and_then_by_its_own_answers(watched):
    watched.write(100)
    assert (seen(watched).told["verdict"], watched.events()) == ("none", [])
    watched.write(60)
    later = seen(watched)
    assert (later.told["against"], later.told["requests"], later.told["verdict"]) == ("answers", 60, "none")


def test_always_with_the_reference_of_the_model_windows_are_judged_too(watched):
    begun = time.time()
    watched.write(60)
    told = anomalies(watched.home, "api", since=begun, config=ALWAYS)
    assert (told["against"], told["requests"], told["verdict"]) == ("model", 60, "none")
    then = time.time()
    watched.write(60, unsure)
    told = anomalies(watched.home, "api", since=then, config=ALWAYS)
    assert (told["against"], told["requests"], told["verdict"]) == ("model", 60, "anomaly")
    assert anomalies(watched.home, "api", since=time.time(), config=ALWAYS)["verdict"] == "insufficient"


def test_a_window_that_a_reference_cannot_judge_goes_on(tmp_path):
    """One that was to be compared with the model's own; the first of an endpoint without one is what later ones are held to."""
    told = compare(answers(FEWEST - 1, seed=1), answers(60, seed=2), CONFIG, against="model")
    assert told["verdict"] == "insufficient"
    assert compare(answers(FEWEST, seed=1), answers(60, seed=2), CONFIG, against="model")["verdict"] == "none"
    known = Followed("model/tiny@1", 10.0)
    assert next_followed(known, {**told, "against": "model"}, CONFIG, now=20.0)[0].since == 10.0
    assert next_followed(known, {**told, "against": "answers"}, CONFIG, now=20.0)[0].since == 20.0
    assert answers_of_reference(write_reference(tmp_path / "few", FEWEST - 1, seed=1)) == []
    assert len(answers_of_reference(write_reference(tmp_path / "enough", FEWEST, seed=1))) == FEWEST


def alarms(folder, config, *, windows, seed, prompts=PROMPTS, size=60, change=lambda made: made):
    """Of so many models, each with a reference and a window of its own, how many stand out."""
    found = 0
    for number in range(windows):
        own = answers_of_reference(write_reference(folder, prompts, seed=[seed, number]))
        window = change(answers(size, seed=[seed, 9000 + number]))
        found += compare(own, window, config, against="model")["verdict"] == "anomaly"
    return found


def test_a_small_reference_gives_no_more_alarms_than_the_setting_says(tmp_path):
    """A perfect detector at 5 % gives more than 6 of 40 once in 300 times; the smallest distance that is told leaves fewer."""
    config = ServiceConfig(false_alarm_rate=0.05)
    assert alarms(tmp_path, config, windows=40, seed=1) <= 6


@pytest.mark.soak
@pytest.mark.parametrize(("rate", "most"), [(0.05, 18), (0.01, 7)])
@pytest.mark.parametrize("prompts", [FEWEST, PROMPTS, 64])
@pytest.mark.parametrize("size", [60, 800])
def test_a_small_reference_gives_no_more_alarms_than_the_setting_says_in_200_windows(
    tmp_path, rate, most, prompts, size
):
    """More than 18 at 5 % in a perfect detector: 0.6 % of the time; more than 7 at 1 %: 0.1 %."""
    config, seed = ServiceConfig(false_alarm_rate=rate), int(os.environ.get("SEED", "1"))
    found = alarms(tmp_path, config, windows=200, seed=seed, prompts=prompts, size=size)
    print(f"{found} alarms of 200 at {rate:g}, reference of {prompts}, windows of {size}, seed {seed}")
    assert found <= most


POWER = {
    "a nat more": (lambda made: [unsure(a) for a in made], 90),
    "half a nat more": (lambda made: [replace(a, entropy=a.entropy + 0.5) for a in made], 50),
    "every second answer odd": (lambda made: every(2, made, lambda a: replace(a, odd=0.4)), 80),
    "every fifth answer odd": (lambda made: every(5, made, lambda a: replace(a, odd=0.4)), 0),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", POWER)
def test_power_of_a_small_reference(tmp_path, name):
    change, least = POWER[name]
    seed = int(os.environ.get("SEED", "1"))
    found = alarms(tmp_path, CONFIG, windows=100, seed=seed, size=200, change=change)
    print(f"{name}: {found} of 100 at {CONFIG.false_alarm_rate:g}, reference of {PROMPTS}")
    assert found >= least
