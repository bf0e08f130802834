"""Which records of a long job become points in MLflow."""

from tasks.compute.logs import Thinning


def records(steps, seconds):
    return [{"step": step, "time": 1000.0 + step * seconds, "loss": 1.0} for step in steps]


def shown(given):
    return [record["step"] for record in Thinning().of(given)]


def test_the_first_steps_are_all_there_and_later_ones_by_their_magnitude():
    steps = shown(records(range(1, 20_001), 0.001))
    assert steps[:999] == list(range(1, 1000))
    assert steps[999:1003] == [1000, 1010, 1020, 1030]
    assert steps[-2:] == [19_900, 20_000]
    assert len(steps) == 999 + 900 + 101


def test_one_in_ten_seconds_is_there_however_many_there_are():
    assert shown(records(range(100_001, 100_021), 5.0)) == list(range(100_001, 100_021, 2))


def test_what_says_something_new_is_there():
    given = records(range(1001, 1010), 0.001)
    for at in (4, 6):
        given[at]["heldout_bits_per_byte"] = 1.5
    assert shown(given) == [1001, 1005, 1007]


def test_records_of_no_step_are_all_there():
    assert len(Thinning().of([{"speed": 1.0}] * 5)) == 5
