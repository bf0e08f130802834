"""Ctrl-C that comes while Python finalises an object is printed and forgotten; a flow ends by it all the same."""

import sys

import pytest

from flows.support import prefect_run


def test_an_interrupt_that_python_could_not_raise_ends_the_flow_at_its_next_look(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    with pytest.raises(KeyboardInterrupt), prefect_run.started_by("run", "a test"):
        _finalise(KeyboardInterrupt)
        assert told == []
        prefect_run.cancelled()
    assert prefect_run.cancelled() is False


def test_other_errors_of_a_finaliser_are_told_as_ever(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    with prefect_run.started_by("run", "a test"):
        _finalise(ValueError)
        assert prefect_run.cancelled() is False
    assert [type(error) for error in told] == [ValueError]


def _finalise(error):
    class Finalised:
        def __del__(self):
            raise error

    Finalised()
