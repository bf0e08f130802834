"""The faults of benchmarks/mutants.py fit the product as it is: each text is there once, and what comes of it is Python."""

import pytest

from benchmarks.mutants import MUTANTS, ROOT

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1
    planted = mutant.after.join(mutant.around(ROOT))
    assert planted == text.replace(mutant.before, mutant.after) != text
    compile(planted, mutant.file, "exec")
