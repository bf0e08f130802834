"""How ranks divide an evaluation: every unit once, put together in one order, and none again after a restart."""

import threading

import numpy as np
import pytest

from tasks.config.cluster import ClusterConfig
from tasks.jobs.evaluation.division import Division, OnRankZero, batches_of_contexts, batches_of_prompts

pytestmark = pytest.mark.unit
UNITS = list(range(11))


def times_ten(computed):
    def compute(unit):
        computed.append(unit)
        return {"value": np.array([unit * 10.0]), "text": np.array([unit], np.uint8)}

    return compute


def values(parts):
    return [float(part["value"][0]) for part in parts.all()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_any_number_of_ranks_computes_every_unit_once(tmp_path, ranks):
    computed: list[int] = []
    shares = [
        Division(tmp_path / "parts", rank, ranks).share("bits", UNITS, times_ten(computed)) for rank in range(ranks)
    ]
    assert sorted(computed) == UNITS
    assert values(shares[0]) == [unit * 10.0 for unit in UNITS]
    for share in shares[1:]:
        with pytest.raises(OnRankZero):
            share.all()


def test_without_a_folder_one_rank_computes_all_in_memory():
    division, computed = Division(), []
    assert values(division.share("bits", UNITS, times_ten(computed))) == [unit * 10.0 for unit in UNITS]
    assert values(division.share("bits", UNITS[:2], times_ten(computed))) == [0.0, 10.0]


def test_what_was_computed_before_a_restart_is_not_computed_again_on_whichever_ranks(tmp_path):
    first: list[int] = []
    Division(tmp_path, 1, 3).share("bits", UNITS, times_ten(first))
    again: list[int] = []
    shares = [Division(tmp_path, rank, 2).share("bits", UNITS, times_ten(again)) for rank in range(2)]
    assert first == [1, 4, 7, 10] and sorted([*first, *again]) == UNITS
    assert values(shares[0]) == [unit * 10.0 for unit in UNITS]


def test_a_rank_remembers_its_share_though_rank_0_removed_the_files(tmp_path):
    computed: list[int] = []
    division = Division(tmp_path, 1, 2)
    division.share("bits", UNITS, times_ten(computed))
    for path in tmp_path.iterdir():
        path.unlink()
    division.share("bits", UNITS, times_ten(computed))
    assert computed == [1, 3, 5, 7, 9]


def test_rank_0_waits_for_the_others_and_says_when_its_time_is_up(tmp_path):
    computed: list[int] = []
    mine = Division(tmp_path, 0, 2).share("bits", UNITS, times_ten(computed))

    def out_of_time():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        list(mine.all(out_of_time))
    other = threading.Thread(target=lambda: Division(tmp_path, 1, 2).share("bits", UNITS, times_ten(computed)))
    other.start()
    assert values(mine) == [unit * 10.0 for unit in UNITS]
    other.join()


def test_the_first_unit_may_be_of_another_rank(tmp_path):
    computed: list[int] = []
    Division(tmp_path, 0, 3).share("one", [0], times_ten(computed), first=2)
    assert not computed
    Division(tmp_path, 2, 3).share("one", [0], times_ten(computed), first=2)
    assert computed == [0]


def test_continuations_of_one_pass_stay_in_one_batch_and_the_longest_come_first():
    requests = [("a", [1, 2], [3]), ("b", [1, 2], [4]), ("c", [1], [2]), ("d", [5, 6, 7, 8], [9]), ("e", [5], [6, 7])]
    assert batches_of_contexts(requests, 2, shared=True) == [[0, 1, 3], [2, 4]]
    assert batches_of_contexts(requests, 2, shared=False) == [[0, 3], [1, 4], [2]]


def test_prompts_are_batched_by_their_settings_and_what_is_drawn_stays_whole():
    greedy, short, drawn = {"until": ["."]}, {"max_gen_toks": 1}, {"do_sample": True}
    arguments = [("bb", greedy), ("x", drawn), ("a", short), ("ccc", greedy), ("y", drawn), ("a", greedy)]
    assert batches_of_prompts(arguments, 2, length=len) == [[1, 4], [3, 0], [5], [2]]


def test_machines_that_measure_take_the_place_of_trainings():
    given = {"backend": "slurm", "nodes": 8, "ranks_per_node": 8, "gpus_per_node": 8, "threads_per_rank": 4}
    one = ClusterConfig.model_validate(given).for_evaluation
    assert (one.nodes, one.ranks_per_node, one.threads_per_rank, one.gpus_per_node) == (1, 1, 32, 8)
    more = ClusterConfig.model_validate({**given, "evaluation": {"nodes": 2, "ranks_per_node": 8}}).for_evaluation
    assert (more.nodes, more.ranks_per_node, more.threads_per_rank, more.gpus_per_node) == (2, 8, 4, 8)
    assert "evaluation" not in ClusterConfig.model_validate(given).model_dump()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"evaluation": {"nodes": 2}},
            r"local has one machine, evaluation\.nodes is 2: use cluster\.evaluation\.ranks",
        ),
        ({"evaluation": {"shard": "always"}}, r"evaluation\.shard is always, and one rank has nobody to share"),
    ],
)
def test_machines_that_cannot_measure_together_are_an_error_that_names_the_setting(given, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig.model_validate(given)
