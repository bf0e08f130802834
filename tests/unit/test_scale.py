"""The virtual clock of `python -m benchmarks.scale`, against what is known without it."""

import random

import pytest

from benchmarks.scale.chain import Corpus, Model, Rates
from benchmarks.scale.clock import Machines, shared_out, superlinear

pytestmark = pytest.mark.unit
RANK = {
    "list": 2.0, "receipts": 3.0, "linking": 1.0, "peak after the list": 10.0, "peak after receipts": 20.0, "peak": 30.0,
    "exact: begin": 0.0, "exact: a range": 1.0, "exact: ranges": 4, "near: begin": 0.0, "near: links": 5.0,
    "near: a range": 10.0, "near: ranges": 4,
}  # fmt: skip
NAMES = {
    "rank": RANK,
    "first": {"receipts": 1.0, "summary": 0.0, "write": 1.0, "rows of a unit": 0.5, "peak": 100.0},
    "launcher": {
        **dict.fromkeys(("shards read", "shards judged", "shards written"), 1.0),
        **dict.fromkeys(("manifest", "manifest written", "manifest read", "peak of the manifest"), 0.0),
        "peak": 50.0,
    },
    "tokens": {"list": 1.0, "receipts": 1.0, "files": 4, "peak": 10.0},
}


@pytest.mark.parametrize("cores", [1, 4])
def test_one_machine_with_equal_units_takes_their_sum_by_its_cores(cores):
    assert shared_out([2.5] * 8, machines=1, cores=cores) == 2.5 * 8 / cores


def test_units_of_all_sizes_take_no_less_than_their_share_and_no_more_than_the_longest_beside_it():
    drawn = random.Random(1)
    for _ in range(200):
        units = [drawn.expovariate(1) for _ in range(drawn.randrange(1, 60))]
        machines, cores = drawn.randrange(1, 6), drawn.randrange(1, 5)
        heaviest = max(sum(units[rank::machines]) for rank in range(machines))
        took = shared_out(units, machines=machines, cores=cores)
        assert max(heaviest / cores, max(units)) <= took + 1e-9
        assert took <= heaviest / cores + max(units) + 1e-9  # Graham 1966: list scheduling


def test_nothing_to_do_takes_no_time_and_idle_machines_do_not_help():
    assert shared_out([], machines=3, cores=2) == 0
    assert shared_out([1.0, 1.0], machines=64, cores=64) == shared_out([1.0, 1.0], machines=2, cores=1) == 1


def rates(**a_byte: float) -> Rates:
    """What a byte takes in each step; every corpus takes two seconds and 100 bytes more."""
    steps = (
        "verify",
        "measure",
        "merge",
        "mark",
        "divide",
        "join",
        "take over",
        "publish",
        "encode",
        "write",
        "publish tokens",
        "tokenizer",
    )

    def corpus(size: int) -> dict:
        of = {step: {"cpu": 2 + size * a_byte.get(step.replace(" ", "_"), 0.0), "written": 0.0} for step in steps}
        often = {**dict.fromkeys(("cpu", "wall", "read", "written"), 0.0), "documents": 1.0}
        return {
            "bytes": size,
            "documents": size / 4,
            "steps": {**of, "judge": often, "judge often": often, "tokens": {"bytes": size / 2}},
        }

    return Rates([corpus(100), corpus(1000)])


def model(machines: Machines, *, shared: bool = True, **a_byte: float) -> Model:
    return Model(Corpus(4000, 1000, [100.0] * 40), rates(**a_byte), NAMES, unit_memory=7.0, on=machines, shared=shared)


def test_a_rate_is_what_more_bytes_take_without_what_every_corpus_takes():
    of = rates(measure=0.25)
    assert of("measure") == 0.25 and of("merge") == 0 and of.document == 4 and of.tokens == 0.5


def test_stages_are_the_work_by_those_who_do_it():
    alone = {stage.name: stage for stage in model(Machines(1, 2), measure=1.0, merge=0.1, verify=0.5).validate()}
    many = {stage.name: stage for stage in model(Machines(4, 2), measure=1.0, merge=0.1, verify=0.5).validate()}
    assert (alone["measure"].seconds, many["measure"].seconds) == (2000, 500)
    assert (alone["near duplicates"].seconds, many["near duplicates"].seconds) == (5 + 20, 5 + 10)
    assert alone["merge"].seconds == many["merge"].seconds == 400 + 1 + 1 + 40 * 0.5
    assert alone["check the input"].seconds == 4000 * 0.5 / 2 and alone["measure"].memory == 20 + 2 * 7
    assert many["merge"].memory == 100 + 21 * 1000 and many["judge"].memory == 50 + 5 * 1000


def test_bytes_that_must_move_bound_a_stage():
    slow = model(Machines(4, 2, network=1.0), measure=1e-9).validate()
    assert next(stage for stage in slow if stage.name == "measure").seconds == (4000 + 536 * 1000) / 4
    throttled = model(Machines(4, 2, network=1e9, files=2.0), shared=False).validate()
    assert throttled[0].seconds == 4 * 4000 / 2, "each machine brings all of it"


def test_machines_that_share_no_folder_leave_the_rest_to_the_first():
    both = [model(Machines(4, 1), shared=shared, write=1.0) for shared in (True, False)]
    near = [next(s for s in each.validate() if s.name == "near duplicates").seconds for each in both]
    writing = [next(s for s in each.preprocess() if s.name == "write token files").seconds for each in both]
    assert near == [15, 45] and writing == [1000, 4000]


def test_ten_times_as_much_may_take_ten_times_as_long():
    assert not superlinear(1.0, 10.0, times=10) and superlinear(1.0, 11.5, times=10)
