"""One home where the tiny lifecycle ran once, and empty ones."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir
from scheduling import scope_of
from support import Home, publish_tiny

pytest_plugins = ["tiers"]

# The same examples at every run, judged by what they find and never by milliseconds. Nothing is written here: tables that
# hypothesis keeps for itself are not this repository's.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "headway-hypothesis")
settings.register_profile(
    "headway",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes: --hypothesis-profile=headway-shrink
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("headway-shrink", settings.get_profile("headway"), phases=(*Phase,))
settings.load_profile("headway")


SHARED = pytest.StashKey[Home]()
ASKED = pytest.StashKey[bool]()
"""Whether a test asked for the shared home since it was stopped."""


@pytest.fixture(scope="session")
def home(tmp_path_factory, pytestconfig):
    """One home with one Prefect server for all tests that need the chain."""
    made = pytestconfig.stash[SHARED] = Home(tmp_path_factory.mktemp("headway") / "home")
    yield made
    made.stop()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After a file, or those that share the lifecycle, nothing asks the home's servers, and they cost time even so."""
    stash = item.config.stash
    stash[ASKED] = stash.get(ASKED, False) or "home" in getattr(item, "fixturenames", ())
    if nextitem and scope_of(item.location[0]) != scope_of(nextitem.location[0]) and SHARED in stash and stash[ASKED]:
        stash[ASKED] = False
        stash[SHARED].stop()


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
    """Tests are shared out as tests/support/scheduling.py says."""
    from scheduling import ByFile

    return ByFile(config, log)
