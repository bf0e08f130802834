"""Which folder is taken for the home when nobody named one."""

import os
from pathlib import Path

import pytest

from tasks.common.home import home, require_known

pytestmark = pytest.mark.unit


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_HOME", raising=False)
    return tmp_path / ".headway"


def test_a_home_that_is_made_or_is_ones_own_is_taken(here):
    assert home() == here
    (here / "store").mkdir(parents=True)
    (here / "latest").symlink_to(here / "store")
    assert home() == here


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_home_of_another_user_is_refused_unless_it_is_named(here, monkeypatch):
    here.mkdir()
    os.chown(here, 12345, -1)
    with pytest.raises(ValueError, match=r"belongs to another user \(uid 12345\).*export HEADWAY_HOME="):
        home()
    monkeypatch.setenv("HEADWAY_HOME", str(here))
    assert home() == here


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_that_another_user_put_there_is_refused(here, tmp_path):
    (tmp_path / "mine").mkdir()
    here.symlink_to(tmp_path / "mine")
    assert home() == here, "a link of one's own"
    os.chown(here, 12345, -1, follow_symlinks=False)
    with pytest.raises(ValueError, match="belongs to another user"):
        home()


@pytest.mark.parametrize("part", ["store", "endpoints", "keys", "policy.yaml"])
def test_a_home_whose_parts_are_links_to_elsewhere_is_refused_unless_it_is_named(here, tmp_path, monkeypatch, part):
    here.mkdir()
    (here / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{part} is a link to .*elsewhere, outside of the home"):
        home()
    monkeypatch.setenv("HEADWAY_HOME", ".headway")
    assert home() == Path(".headway").absolute()


@pytest.mark.parametrize("named", [None, "", "some/home"])
def test_a_worker_whom_nobody_told_of_a_home_names_the_variable_and_what_to_do(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if named is None:
        monkeypatch.delenv("HEADWAY_HOME", raising=False)
    else:
        monkeypatch.setenv("HEADWAY_HOME", named)
    with pytest.raises(ValueError, match=r"HEADWAY_HOME is .*prefect worker start .*prefect deploy --all"):
        require_known()
    home().mkdir(parents=True)
    require_known()
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "not-made-yet"))
    require_known()
