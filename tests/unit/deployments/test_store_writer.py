"""Who may write to the store, and holds no key, does not choose which programs run: those are of this run's configuration."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from made_versions import make

from deployments.cli.cluster.qualify import _drained_by_us
from deployments.cli.revalidate import of_champion
from tasks.artifacts import Cluster, as_configured
from tasks.common.process import write_json
from tasks.common.seal import opened, sealed
from tasks.compute.job_folder import Folders
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig
from tasks.qualification.verdicts import ClusterVerdict
from tasks.registry.refs import move_ref
from tasks.security.signatures import sign
from tasks.storage import open_store

pytestmark = pytest.mark.unit

EVIL = {"python": "/tmp/evil", "environment": {"LD_PRELOAD": "/tmp/evil.so"}}
MADE = {"validation": {"min_documents": 7}, "cluster": {"python": "/opt/old/python", "ranks_per_node": 3}}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def champion(home, folder, made):
    """A signed model that was made with a configuration."""
    store = open_store(home)
    data = make(store, folder / "data", "dataset/mine", {"a": "a"})
    model = make(store, folder / "m", "model/tiny", {"w": "w"}, inputs=(data,), config=made, config_digest=digest(made))
    sign(store, home, model)
    move_ref(store, "tiny/champion", model.ref, inputs=(), reason="test")
    return home / "store" / "artifacts" / "model" / "tiny" / model.version / "manifest.json"


def test_a_revalidation_has_the_champions_settings_and_this_homes_programs(home, tmp_path):
    manifest = champion(home, tmp_path, MADE)
    config = of_champion("tiny", "mine", [])["config"]
    assert config["validation"]["min_documents"] == 7
    assert config["cluster"] == ClusterConfig().model_dump(mode="json")
    said = json.loads(opened(manifest.read_bytes(), where="x"))
    said["provenance"]["config"] |= {"cluster": EVIL, "validation": {"min_documents": 1}}
    manifest.chmod(0o644)
    manifest.write_bytes(sealed(json.dumps(said).encode()))
    config = of_champion("tiny", "mine", [])["config"]
    assert config["cluster"] == ClusterConfig().model_dump(mode="json")
    assert config["validation"]["min_documents"] != 1
    assert of_champion("tiny", "mine", ["cluster.python=/opt/new"])["config"]["cluster"]["python"] == "/opt/new"


def test_a_champion_that_was_made_elsewhere_wants_the_configuration_that_says_where(home, tmp_path):
    champion(home, tmp_path, {"cluster": {"backend": "slurm", "slurm": {"login": "evil"}}})
    with pytest.raises(ValueError, match="was made on the backend slurm; .* -c CONFIG"):
        of_champion("tiny", "mine", [])
    config = of_champion("tiny", "mine", ["cluster.backend=local"])["config"]
    assert config["cluster"]["slurm"]["login"] == ""


def test_a_recorded_qualification_vouches_for_machines_and_not_for_programs():
    ours = ClusterConfig(backend="ssh", nodes=3, ssh={"hosts": ["a", "b", "c"]}, exclude=("x",), python="/opt/python")
    forged = ours.model_copy(update={**EVIL, "image": "evil", "nodes": 2, "exclude": ("x", "c")})
    proven = Cluster(
        name="other", backend="local", nodes=2, ranks_per_node=9, threads_per_rank=9, proven=("a", "b"), config=forged,
        qualification="qualification/local@1", memory_bytes_per_node=5,
    )  # fmt: skip
    now = as_configured(proven, ours)
    assert now.config == ours.model_copy(update={"nodes": 2, "exclude": ("x", "c")})
    assert (now.name, now.backend, now.ranks_per_node, now.threads_per_rank) == ("local", "ssh", 2, 1)
    assert (now.proven, now.qualification, now.memory_bytes_per_node) == (
        ("a", "b"),
        "qualification/local@1",
        5,
    )


def test_machines_come_back_by_the_way_that_this_home_knows(home, tmp_path):
    verdict = ClusterVerdict(verdict="failed", sku="local-cpu", sku_digest="d", nodes=())
    page = {"verdict": verdict.model_dump(mode="json"), "drained": [{"node": "n3", "done": True}]}
    evil = {"name": "hpc", "backend": "slurm", "slurm": {"login": "evil", "ssh": {"config": "/tmp/evil"}}}
    files = {"qualification.json": json.dumps(page)}
    created = datetime.now(UTC).isoformat()
    make(open_store(home), tmp_path / "q", "qualification/hpc", files, config={"cluster": evil}, created=created)
    with pytest.raises(ValueError, match="no job of this home went to the cluster hpc: .* -c CONFIG"):
        _drained_by_us(["n3"])
    ours = ClusterConfig(name="hpc", backend="slurm", slurm={"login": "ours"})
    write_json(home / "jobs" / "benchmark-1" / "cluster.json", ours.model_dump(mode="json"))
    assert _drained_by_us(["n3"]) == [ours]


def test_what_says_what_runs_where_is_not_brought_from_where_jobs_run(tmp_path):
    wanted = []
    synced = SimpleNamespace(pull=wanted.append)
    files = SimpleNamespace(folder=lambda prefix, local, key, *, but: synced)
    files.jobs = files
    Folders(files).pull("jobs/a", tmp_path / "jobs" / "a", ended=True, key=b"")
    names = (
        "cluster.json",
        "job.json",
        "config.json",
        "program/mine.py",
        "settled.json",
        "result.json",
        "logs/rank-0.log",
    )
    assert [name for name in names if wanted[0](name)] == ["result.json", "logs/rank-0.log"]
