"""One Azurite for all tests of a process that need it, and the stores under test; each test takes a container of its own."""

import azurite as emulator
import pytest
from store_stand import KINDS, LIVE, standing

MARKS = {
    "live": pytest.mark.skipif(not LIVE, reason="HEADWAY_AZURE_TEST_ACCOUNT names no account"),
    "faulty": pytest.mark.long,  # single faults, and many one after the other, are test_faults.py's
}


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    with emulator.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture(params=[pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def stand(request, tmp_path):
    """A store with all that stands behind it: of every kind, unless the test says of which."""
    with standing(request.param, tmp_path / "home", lambda: request.getfixturevalue("azurite")) as made:
        yield made
