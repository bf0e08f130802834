"""What is said of answers, once, by whoever looks: labels and refusals among them, with the evidence."""

import threading
import time

import pytest
from watched import MODEL, Watched, loop

from tasks.common.errors import Unknown
from tasks.common.process import read_json, write_json
from tasks.serving.known import require_known
from tasks.serving.monitor.watch import Followed, brief, history, look, standing_anomalies


@pytest.fixture
def watched(tmp_path):
    made = Watched(tmp_path)
    seen(made)
    made.write(300)
    assert seen(made).told["verdict"] == "insufficient"  # there is nothing before it
    return made


def seen(watched, **how):
    (one,) = look(watched.home, time.time(), **how)
    return one


def test_an_event_names_the_file_with_all_that_was_found(watched):
    watched.write(100, loop)
    assert seen(watched).said == () and watched.events() == []
    watched.write(100, loop)
    dry = seen(watched, dry=True)
    assert (dry.said, dry.evidence, watched.events()) == (("repetition",), "", [])
    told = seen(watched)
    assert told.said == told.standing == ("repetition",)
    (event,) = watched.events()
    assert (event["status"], event["data"]["model"], list(event["data"]["columns"])) == (
        "accepted",
        MODEL,
        ["repetition"],
    )
    assert event["data"]["evidence"] == told.evidence
    evidence = read_json(watched.home / told.evidence)
    column = next(one for one in evidence["columns"] if one["name"] == "repetition")
    assert column["verdict"] == "anomaly" and column["histogram"]["new"] and evidence["since"] > 0
    assert brief("api", told)["said"] == ["repetition"]
    watched.write(100)
    again = seen(watched)
    assert (again.said, again.standing) == ((), ("repetition",)) and len(watched.events()) == 1
    assert list(standing_anomalies(watched.home)) == ["api"]


def test_answers_that_callers_call_wrong_are_said_at_once_and_late_labels_are_a_window_of_their_own(watched):
    watched.write(100, right=lambda place: place % 10 > 0)
    assert seen(watched).said == ()
    begun = time.time()
    for _ in range(3):  # few labels a window: none of these windows has enough
        watched.write(60, right=None)
        watched.write(8, right=lambda place: False)
        last = seen(watched)
        if last.said:
            break
    assert last.said == ("accuracy",) and last.told["labels"] >= 20
    (event,) = watched.events()
    assert "right 90.0% -> 0.0%" in event["data"]["columns"]["accuracy"][0]
    kept = Followed(**read_json(watched.home / "platform" / "anomalies.json")["api"])
    assert kept.labels_since >= begun
    rows = history(watched.home, "api", requests=100, windows=3)
    assert rows[-1]["accuracy"] == 0.0 and len(rows) == 3


def test_of_two_who_look_at_once_one_says_it(watched):
    watched.write(100, loop)
    seen(watched)
    watched.write(100, loop)
    found = []
    both = [threading.Thread(target=lambda: found.append(seen(watched))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert sorted(one.said for one in found) == [(), ("repetition",)] and len(watched.events()) == 1


def test_only_some_are_looked_at_and_an_unknown_one_is_said(watched, tmp_path):
    other = Watched(tmp_path, "other")
    assert [one.endpoint for one in look(tmp_path, time.time(), only=("other",))] == ["other"]
    kept = read_json(tmp_path / "platform" / "anomalies.json")
    assert set(kept) == {"api", "other"}
    with pytest.raises(Unknown):
        require_known(tmp_path, "third")
    assert brief("third", None)["verdict"] == "stopped" and other.events() == []


def test_what_an_older_release_kept_is_read_on(watched):
    path = watched.home / "platform" / "anomalies.json"
    kept = read_json(path)
    del kept["api"]["labels_since"]
    write_json(path, kept)
    watched.write(100, right=lambda place: True)
    assert seen(watched).told["verdict"] == "none"
