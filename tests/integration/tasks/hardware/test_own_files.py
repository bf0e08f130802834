"""Files of hardware of one's own: they come first, may change one number of a shipped one, and say what is wrong with them."""

import pytest
import yaml

from tasks.hardware.files import known_skus
from tasks.hardware.sku import load_sku

GOOD = {
    "name": "mine",
    "vendor": "nvidia",
    "sources": {"me": {"what": "my own bench", "date": "2026-11-22"}},
    "limits": {"ib_rate": {"unit": "Gbit/s", "fail": 200, "source": "me"}},
}


def write(folder, name, said):
    path = folder / f"{name}.yaml"
    path.write_text(said if isinstance(said, str) else yaml.safe_dump(said))
    return path


def refused(folder, said, name="mine"):
    path = write(folder, name, said)
    with pytest.raises(ValueError) as error:
        load_sku(name, folder)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_file_of_ones_own_is_found_by_name_alias_and_path(tmp_path):
    path = write(tmp_path, "mine", {**GOOD, "aliases": ["Standard_X9"]})
    found = load_sku("mine", tmp_path)
    assert found.limits["ib_rate"].fail == 200.0
    assert found == load_sku("standard_x9", tmp_path) == load_sku(str(path))
    with pytest.raises(ValueError, match="'mine': nothing is known of it; known are .*local-cpu"):
        load_sku("mine")


def test_it_comes_before_ours_of_the_same_name(tmp_path):
    write(tmp_path, "Standard_ND96isr_H100_v5", {**GOOD, "name": "nd96isr_h100_v5"})
    assert set(load_sku("Standard_ND96isr_H100_v5", tmp_path).limits) == {"ib_rate"}
    assert known_skus(tmp_path)["nd96isr_h100_v5"].parent == tmp_path
    assert len(load_sku("Standard_ND96isr_H100_v5").limits) > 1


def test_one_number_of_a_shipped_file_is_changed(tmp_path):
    said = {
        "name": "nd96isr_h100_v5",
        "based_on": "Standard_ND96isr_H100_v5",
        "sources": GOOD["sources"],
        "limits": {"host_to_device": {"unit": "GB/s", "fail": 40, "source": "me"}, "nvme_count": None},
        "collectives": [{"scope": "node", "bytes": 2**34, "fail": 455, "source": "me"}],
    }
    write(tmp_path, "nd96isr_h100_v5", said)
    ours, mine = load_sku("nd96isr_h100_v5"), load_sku("nd96isr_h100_v5", tmp_path)
    assert (mine.limits["host_to_device"].fail, mine.limits["host_to_device"].warn) == (40.0, None)
    assert set(ours.limits) - set(mine.limits) == {"nvme_count"}
    assert {key: limit for key, limit in mine.limits.items() if key != "host_to_device"}.items() <= ours.limits.items()
    by_size = {(c.scope, c.bytes): c.fail for c in mine.collectives}
    assert by_size == {(c.scope, c.bytes): c.fail for c in ours.collectives} | {("node", 2**34): 455.0}
    assert (mine.environment, mine.aliases) == (ours.environment, ())


def test_a_file_that_is_based_on_itself_or_on_nothing(tmp_path):
    assert "based_on 'mine': it is based on itself" in refused(tmp_path, {"name": "mine", "based_on": "mine"})
    other = write(tmp_path, "other", {"name": "other", "based_on": "mine"})
    write(tmp_path, "mine", {"name": "mine", "based_on": "other"})
    with pytest.raises(ValueError, match=f"{other}: based_on 'mine': it is based on itself"):
        load_sku("mine", tmp_path)
    assert "there is no file of this name" in refused(tmp_path, {"name": "mine", "based_on": "nd95"})


def test_what_is_wrong_is_named(tmp_path):
    limit = GOOD["limits"]["ib_rate"]

    def with_limit(**change):
        return refused(tmp_path, {**GOOD, "limits": {"ib_rate": {**limit, **change}}})

    assert "limits.ib_rate.fial: there is no such key; did you mean" in with_limit(fial=400)
    assert "limits.ib_rate.warn" in (said := with_limit(warn="much")) and "not 'much'" in said
    assert "limits.ib_rate: its unit is Gbit/s, and the file says 'GB/s'" in with_limit(unit="GB/s")
    assert "sources you are named and not there" in with_limit(source="you")
    assert "norm None, warn 100.0, fail 200.0: higher is better" in with_limit(warn=100)
    assert "better: equal needs fail" in with_limit(better="equal", fail=None)
    assert "limits.ib_rat: there is no such name; known are" in refused(tmp_path, {**GOOD, "limits": {"ib_rat": limit}})
    assert "vendor: Input should be 'nvidia'" in refused(tmp_path, {**GOOD, "vendor": "intel"})
    assert "its name is 'yours'" in refused(tmp_path, {**GOOD, "name": "yours"})
    assert "specs.peak_bf16_tflops: its unit is TFLOP/s, and the file says 'GFLOP/s'" in refused(
        tmp_path, {**GOOD, "specs": {"peak_bf16_tflops": {"value": 1, "unit": "GFLOP/s", "source": "me"}}}
    )
    assert "sources.me.date" in refused(tmp_path, {**GOOD, "sources": {"me": {"what": "x", "date": "soon"}}})
    assert "it has no keys" in refused(tmp_path, "")
    assert "is no YAML" in refused(tmp_path, "name: [")


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.yaml'?: No such file"):
        load_sku(str(tmp_path / "nowhere.yaml"))


def test_a_broken_file_beside_it_is_no_obstacle_to_the_name_of_another(tmp_path):
    write(tmp_path, "broken", "name: [")
    assert load_sku("local-cpu", tmp_path).name == "local-cpu"
    assert load_sku("Standard_ND96amsr_v4", tmp_path).name == "Standard_ND96amsr_A100_v4"
