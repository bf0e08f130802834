"""The faults of benchmarks/mutants.py and sabotages.py fit the product as it is: a text that is there once, and then Python."""

import pytest

from benchmarks.mutants import MUTANTS, ROOT
from benchmarks.sabotages import SABOTAGES
from deployments.rehearsal.run import FAULTS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mutant", [*MUTANTS, *SABOTAGES], ids=lambda mutant: mutant.name)
def test_mutant_fits(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1
    planted = mutant.after.join(mutant.around(ROOT))
    assert planted == text.replace(mutant.before, mutant.after) != text
    compile(planted, mutant.file, "exec")


def test_each_sabotage_names_a_rehearsal_of_its_own():
    named = [one.fault for one in SABOTAGES]
    assert len(set(named)) == len(named) and set(named) <= {fault.name for fault in FAULTS}
