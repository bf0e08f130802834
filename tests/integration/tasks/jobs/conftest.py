"""What most tests of the training job begin with: ranks that can be forked, and tokens that can be learnt."""

import pytest
from training_runs import Forks, write_tokens


@pytest.fixture(scope="session")
def forks():
    """Runs a job to its end, on ranks forked from a process that has imported torch already; one a worker."""
    started = Forks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))
