"""Many answers in one run of the graph: whoever joins, leaves or is given up, every other answer stays what it is alone."""

import random

import pytest
from tiny_model import CONTEXT

from tasks.jobs.serving.batch import Batch
from tasks.jobs.serving.decoder import Choice, entropy
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.runtime import Ask, Ending, Unfit

REQUESTS = 40


@pytest.fixture(scope="module")
def generation(model):
    return Generation(model, 1, rows=5)


def tokens_of(said):
    return {number: what.tokens for number, what in said if isinstance(what, Ending)}


def alone(generation, ask):
    batch, told = Batch(generation), {}
    batch.add(0, ask)
    while batch.busy:
        told |= tokens_of(batch.step())
    return told[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_that_join_leave_and_are_dropped_at_any_step_are_what_they_are_alone(generation, seed):
    chance = random.Random(seed)
    asks = [
        Ask(
            f"def f{number}(x):\n" + "    y = x\n" * chance.randrange(20),
            chance.randrange(1, 60),
            temperature=chance.choice([0.0, 0.0, 1.0]),
            seed=number,
        )
        for number in range(REQUESTS)
    ]
    batch, joined, told, dropped = Batch(generation), 0, {}, set()
    while batch.busy or joined < REQUESTS:
        if joined < REQUESTS and chance.random() < 0.4:
            batch.add(joined, asks[joined])
            joined += 1
        if joined and chance.random() < 0.03 and (number := chance.randrange(joined)) not in told:
            batch.drop(number)
            dropped.add(number)
        told |= tokens_of(batch.step())
    assert dropped and told.keys() == set(range(REQUESTS)) - dropped
    assert told == {number: alone(generation, asks[number]) for number in told}


def test_a_prompt_longer_than_a_chunk_is_read_in_pieces_between_the_steps_of_others(generation):
    long = Ask("x = 1\n" * 35, 8)
    assert len(generation.encode(long.prompt)) > 128
    batch = Batch(generation)
    batch.add(1, Ask("class ", 60, temperature=1.0, seed=2))
    batch.step()
    batch.add(2, long)
    steps = []
    while batch.busy:
        steps.append(batch.step())
    first = next(place for place, said in enumerate(steps) if 2 in dict(said))
    assert first >= 1 and any(1 in dict(said) for said in steps[:first])
    assert tokens_of([said for step in steps for said in step])[2] == alone(generation, long)


def test_more_than_there_are_rows_wait_and_are_answered_in_turn(generation):
    batch = Batch(generation)
    for number in range(12):
        batch.add(number, Ask("import ", 10, temperature=1.0, seed=number))
    order = []
    while batch.busy:
        order += tokens_of(batch.step())
    assert sorted(order) == list(range(12)) and set(order[:2]) <= set(range(5))


def test_what_does_not_fit_into_memory_is_unfit(generation):
    batch = Batch(generation)
    batch._room = CONTEXT // 2
    with pytest.raises(Unfit, match="memory here has room for 128"):
        batch.add(1, Ask("def ", CONTEXT))
    batch.add(2, Ask("def ", 20))
    batch.add(3, Ask("def ", 120))  # waits until there is room beside nobody
    told = {}
    while batch.busy:
        told |= tokens_of(batch.step())
    assert told.keys() == {2, 3}


def test_what_is_drawn_has_the_models_shares():
    import numpy as np

    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, wanted in ((1.0, [0.5, 0.3, 0.15, 0.05]), (0.8, [0.625, 0.375, 0.0, 0.0])):
        choice = Choice(Ask("", 1, temperature=1.0, top_p=top_p, seed=1))
        drawn = np.bincount([choice.token(logits) for _ in range(1500)], minlength=4) / 1500
        assert drawn == pytest.approx(wanted, abs=0.05)
    wide = np.random.default_rng(1).normal(size=5000).astype(np.float32) / 100  # its nucleus is nearly all of it
    choice = Choice(Ask("", 1, temperature=1.0, top_p=0.95, seed=1))
    assert len({choice.token(wide) for _ in range(200)}) > 180
    assert entropy(np.zeros((1, 1, 8), np.float32)) == pytest.approx(np.log(8), abs=1e-6)
