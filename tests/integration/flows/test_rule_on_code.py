"""A rule on the suite `code`, through whole retrainings: it lets a model through that writes what it should, and no other.

The second corpus is as easy to learn as the first, so bits per byte see nothing: only running what the model writes does.
"""

import json
import random
import time

import pytest
from support import Ran
from waiting import limit

from tasks.registry.refs import aliases
from tasks.storage import open_store

RULE = {"metric": "code.pass_share", "at_least": 0.5, "min_documents": 10}
WORDS = (
    "river",
    "stone",
    "amber",
    "cloud",
    "maple",
    "hollow",
    "ember",
    "quartz",
    "willow",
    "falcon",
    "cedar",
    "copper",
)


def functions(count, answer, *, seed):
    """So many functions that should all give 7, and give `answer`."""
    dice = random.Random(seed)
    for place in range(count):
        name = f"{dice.choice(WORDS)}_{dice.choice(WORDS)}_{place}"
        note = "\n".join(f"# {' '.join(dice.choices(WORDS, k=8))}" for _ in range(3))
        yield name, f"{note}\n{prompt_of(name)} return {answer}\n"


def prompt_of(name):
    """Indented by one space: the tokenizer takes more of them together with the line feed before, which the prompt ends in."""
    return f'def {name}():\n """Give seven.\n\n >>> {name}()\n 7\n """\n'


def publish(home, folder, answer):
    folder.mkdir()
    for name, text in functions(240, answer, seed=answer):
        (folder / f"{name}.py").write_text(text)
    return home.ok("dataset", "publish", "functions", folder, "--include", "*.py")


@pytest.fixture
def config(fresh, tmp_path):
    """Functions to complete whose names no corpus has, and the words of a retraining that measures by them."""
    problems = tmp_path / "problems.jsonl"
    made = [{"name": name, "prompt": prompt_of(name)} for name, _ in functions(12, 7, seed=1)]
    problems.write_text("".join(json.dumps(one) + "\n" for one in made))
    fresh.ok("dataset", "publish", "problems", problems, "--text-field", "prompt")
    return ("--dataset", "functions", "--set", "training.steps=100", "--set", "comparison.max_loss_to_champion=100",
            "--set", "evaluation.code.problems=dataset/problems", "--set", "evaluation.code.tokens=16")  # fmt: skip


def retrain(home, config, rule, *words):
    """As `home.retrain`, with the time that a busy machine takes."""
    rules, began = ("--set", f"comparison.rules={json.dumps([rule])}"), time.monotonic()
    command = home.start("retrain", "-c", "tiny", *config, *rules, *words, "--json")
    out, err = command.communicate(timeout=limit(900))
    ran = Ran(command.returncode, json.loads(out), err)
    print(f"exit code {ran.code}, {time.monotonic() - began:.0f} s, pass_share {pass_share(ran)}")
    return ran


def pass_share(ran):
    return ran.stage("evaluate")["metrics"].get("code.pass_share")


@pytest.mark.long
@pytest.mark.timeout(2700)
def test_a_model_that_writes_what_runs_is_promoted_and_one_that_does_not_stays_out(fresh, config, tmp_path):
    publish(fresh, tmp_path / "right", 7)
    first = retrain(fresh, config, RULE)
    assert first.code == 0, first.stderr
    assert pass_share(first) >= 0.5 and first.statuses()["deploy"] == "ran"
    champion = aliases(open_store(fresh.path), "tiny")["champion"]
    assert first.said["endpoint"]["model"] == champion

    publish(fresh, tmp_path / "wrong", 8)
    second = retrain(fresh, config, RULE)
    assert (second.code, second.said["error"]["type"]) == (3, "GateFailed"), second.stderr
    closed = [check for check in second.said["error"]["checks"] if not check.get("passed")]
    assert [check["name"] for check in closed] == ["code.pass_share"], closed
    assert pass_share(second) < 0.5 and closed[0]["measured"] == pass_share(second)
    assert (second.statuses()["evaluate"], second.statuses()["export"]) == ("gate_closed", "not_run")
    assert aliases(open_store(fresh.path), "tiny") == {"champion": champion}
    (served,) = fresh.ok("endpoint", "list").said["endpoints"]
    assert served["model"] == champion

    opened = retrain(fresh, config, {**RULE, "at_least": 0.0}, "--to", "export")
    assert opened.code == 0, opened.stderr
    assert (opened.statuses()["evaluate"], opened.statuses()["export"]) == ("reused", "ran")
