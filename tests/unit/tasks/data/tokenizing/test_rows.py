"""Packing of conversations into rows."""

from itertools import pairwise

import numpy as np
import pytest

from tasks.data.tokenizing import rows
from tasks.data.tokenizing.rows import pack

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("count", [0, 1, 7, 500])
def test_every_conversation_is_in_one_row_that_has_room_for_it(count, monkeypatch):
    monkeypatch.setattr(rows, "BUFFER", 100)
    sizes = np.random.default_rng(count).integers(2, 21, size=count).astype(np.int32)
    packed, begins = pack(sizes, 64, seed=3)
    assert sorted(packed.tolist()) == list(range(count))
    assert begins[0] == 0 and begins[-1] == count and (np.diff(begins) > 0).all()
    held = [int(sizes[packed[begin:end]].sum()) for begin, end in pairwise(begins)]
    assert max(held, default=0) <= 64 and len(held) <= 1.1 * sizes.sum() / 64 + count // 100 + 1


def test_the_rows_are_those_that_the_first_release_with_them_had():
    """Resuming breaks when this changes."""
    packed, begins = pack(np.array([5, 3, 9, 2, 2, 7, 4, 6]), 10, seed=1234)
    assert (packed.tolist(), begins.tolist()) == ([2, 5, 1, 7, 6, 0, 3, 4], [0, 1, 3, 5, 8])
    assert pack(np.array([5, 3, 9, 2, 2, 7, 4, 6]), 10, seed=1)[0].tolist() != packed.tolist()
