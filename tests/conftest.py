"""One home where the tiny lifecycle ran once, and empty ones."""

import pytest
from support import Home, publish_tiny


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """One home with one Prefect server for all tests that need the chain."""
    made = Home(tmp_path_factory.mktemp("headway") / "home")
    yield made
    made.stop()


@pytest.fixture
def fresh(tmp_path):
    """An empty home, for what must not see another test's state."""
    made = Home(tmp_path / "home")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def done(home):
    """The tiny lifecycle, run once from nothing."""
    publish_tiny(home)
    ran = home.retrain()
    assert ran.code == 0, ran.stderr
    return ran


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests are shared out as tests/scheduling.py says."""
    from scheduling import ByFile

    return ByFile(config, log)
