"""`headway qualify`: which options go together, and drained machines put back through it on a real Slurm."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from slurm_stand import slurm

from deployments.cli.cluster.qualify import _table, qualify
from deployments.cli.output import CommandError
from tasks.common.errors import Unknown
from tasks.compute import machines_of
from tasks.config.cluster import ClusterConfig
from tasks.security.audit import entries
from tasks.storage import open_store

ON_SLURM = ["cluster.backend=slurm", "cluster.name=stand"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"quick": True, "full": True}, "--quick and --full are two depths"),
        ({"from_": [Path("x")]}, "--from needs --sku"),
        ({"from_": [Path("x")], "history": "n1"}, "--from and --history are different things"),
        ({"from_": [Path("x")], "sku": "local-cpu", "nodes": "a"}, "--nodes does not go with --from"),
        ({"sku": "local-cpu"}, "--sku does not go with a measurement: set benchmark.sku"),
        ({"history": "n1", "full": True}, "--full does not go with --history"),
        ({"resume": True, "record": "x"}, "--record does not go with --resume"),
        ({"replace": True}, "--replace is of --record NAME"),
        ({"more": ["n1"]}, "'n1' belongs to no option: give machines with --nodes"),
        ({"reason": "why"}, "--reason does not go with a measurement"),
        ({"resume": True}, "no qualification of this home has drained any machine"),
        ({"resume": True, "config": ["tiny"]}, "backend local has no drained machines"),
        ({"quick": True, "standard": True}, "--quick and --standard are two depths"),
        ({"drain": True, "resume": True}, "--drain and --resume are different things"),
        ({"drain": True, "config": ["tiny"], "more": ["n1"]}, "backend local drains no machines"),
        ({"drain": True, "set_": ON_SLURM}, "--drain names no machine"),
        ({"drain": True, "set_": ON_SLURM, "more": ["n1"]}, "--drain needs --reason TEXT"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(home, options, said):
    with pytest.raises(ValueError, match=said):
        qualify(**options)
    assert not (home / "prefect").exists()


def test_people_read_the_page_in_the_last_line():
    fields = {"verdict": "healthy", "sku": "local-cpu", "expires": "tomorrow", "page": "/a/qualification.html"}
    shown = StringIO()
    empty = dict.fromkeys(("nodes", "reasons", "drained", "requests", "excluded", "usable"), ())
    Console(file=shown, width=200).print(_table({**empty, **fields}))
    last = shown.getvalue().splitlines()[-1]
    assert last.rstrip() == "healthy, as local-cpu, until tomorrow; page: /a/qualification.html"


def test_a_machine_without_a_past_is_unknown(home):
    with pytest.raises(Unknown, match="no qualification knows a machine 'n1'"):
        qualify(history="n1")


def test_what_headway_drained_is_put_back_by_the_command_and_what_a_person_names_is_drained(home, capsys):
    with slurm(2, cpus=1) as stand, pytest.MonkeyPatch.context() as environment:
        for name, value in stand.environment.items():
            environment.setenv(name, value)
        machines_of(ClusterConfig.model_validate({"backend": "slurm"})).drain({"n1": "slow"})
        stand.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=theirs")
        with pytest.raises(CommandError, match="not resumed: n2: not drained by Headway") as failed:
            qualify(resume=True, more=["n1", "n2"], set_=ON_SLURM, reason="repaired", as_json=True)
        assert failed.value.fields["resumed"] == ["n1"]
        machines_of(ClusterConfig.model_validate({"backend": "slurm"})).drain({"n1": "slow"})
        qualify(resume=True, set_=ON_SLURM, as_json=True)
        assert json.loads(capsys.readouterr().out)["resumed"] == ["n1"]
        assert (stand.node_state("n1")[:4], stand.node_state("n2")) == ("idle", "drained")
        qualify(drain=True, more=["n1"], set_=ON_SLURM, reason="a person looked", as_json=True)
        assert json.loads(capsys.readouterr().out)["drained"] == ["n1"]
        assert stand.node_state("n1").startswith("drain")
    assert [entry.reason for entry in entries(open_store(home)) if entry.action == "drain"] == ["a person looked"]
    told = [entry for entry in entries(open_store(home)) if entry.action == "resume"]
    assert [entry.reason for entry in told] == ["", "repaired"] and told[1].what == "stand: n1, n2"
