"""Training on machines that share no folder, with a real Azurite: what goes to the store, what comes back, and when."""

import threading
import uuid

import azurite
import pytest
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT
from training_runs import CONFIG, all_lines, error, numbers, result, said_by, write_job

from tasks.common.process import read_json, write_json
from tasks.config.engines.registry import ENGINES
from tasks.config.training import ExecutionConfig
from tasks.jobs.checkpoint.files import claim_attempt, manifests
from tasks.jobs.checkpoint.mirrored import agree_to
from tasks.jobs.checkpoint.writer import Writing
from tasks.jobs.node.mirror import Mirror, Where
from tasks.storage.blob.client import open_container
from tasks.storage.blob.folder import BlobFolder
from tasks.storage.settings import StoreConfig

SECRET = "HEADWAY_TEST_CONNECTION"
BATCH = CONFIG.model_copy(update={"steps": 24})
EVERY = 8
RANKS = """
import os
os.environ["HEADWAY_JOB"] = "{disks}/" + os.environ["RANK"] + "/one"
from tasks.jobs.train import Training
advance = Training._advance
def until(self):
    self.saves.room(wait=True)  # no save is left out for being slow: what is in the store is known
    if self.step == {step}:
        os._exit(9)
    return advance(self)
Training._advance = until
"""
WAITS = """
from tasks.jobs.train import Training
advance = Training._advance
def wait(self):
    self.saves.saver.wait()
    return advance(self)
Training._advance = wait
"""


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as running:
        yield running


class Machines:
    """One rank each, with a mirror over a disk of its own."""

    def __init__(self, forks, store, launcher):
        self.forks, self.store, self.launcher, self.attempt, self.config = forks, store, launcher, 0, BATCH
        self.side = BlobFolder(open_container(store), "jobs/one", launcher, theirs=True)

    def train(self, disks, *, ranks=2, dies=None, **execution):
        """On disks on which nothing lies. Machines whose ranks die are gone without a last word."""
        self.attempt += 1
        write_job(self.launcher, self.tokens, self.config, every=EVERY, **settings(self.config, execution))
        job = {"submission": self.attempt, "inputs": {}, "artifacts": {}, "program": "", "ranks_per_node": 1}
        write_json(self.launcher / "job.json", job)
        self.side.push(lambda name: name in ("config.json", "job.json"), settled=True)
        mirrors = [
            Mirror(self.store, "jobs/one", Where(rank, f"vm{rank}", ""), disks / str(rank)) for rank in range(ranks)
        ]
        for mirror in mirrors:
            mirror.begin()
            mirror.checkpoints.start()
        over = threading.Event()
        turning = [threading.Thread(target=turn, args=(mirror, over)) for mirror in mirrors]
        for thread in turning:
            thread.start()
        try:
            codes = self.forks(
                mirrors[0].local, attempt=self.attempt, ranks=ranks, fault=RANKS.format(disks=disks, step=dies)
            )
        finally:
            over.set()
            for thread, mirror in zip(turning, mirrors, strict=True):
                thread.join()
                mirror.checkpoints.finish() if dies else mirror.finish()
        said = "".join(said_by(mirror.local) for mirror in mirrors)
        assert codes == [9 if dies else 0] * ranks, said
        return mirrors

    def stored(self, ending=""):
        """Names in the store of the checkpoints' files."""
        names = [
            blob.name.removeprefix("jobs/one/") for blob in self.side.container.listing("jobs/one/checkpoints/step-")
        ]
        return sorted(name for name in names if name.endswith(ending))


def settings(config, execution):
    """What a job is handed of how it runs, and its engine."""
    own = ENGINES[config.engine].job_settings(config, ExecutionConfig.model_validate(execution))
    return {"execution": execution, **own}


def turn(mirror, over):
    while not over.wait(0.3):
        mirror.step()


@pytest.fixture(scope="module")
def new_machines(forks, blobs, tokens):
    """Makes machines with an empty store of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, blobs.connection_string)

        def make(launcher):
            container = f"c{uuid.uuid4().hex[:20]}"
            BlobServiceClient.from_connection_string(blobs.connection_string).create_container(container)
            uri = f"az://{ACCOUNT}/{container}"
            store = StoreConfig(uri=uri, credential="connection_string", secret=f"env:{SECRET}")
            made = Machines(forks, store, launcher)
            made.tokens = tokens
            return made

        yield make


@pytest.fixture
def machines(new_machines, tmp_path):
    return new_machines(tmp_path / "launcher")


@pytest.fixture(scope="module")
def lost(new_machines, tmp_path_factory):
    """Machines that were lost after the checkpoint of step 16, and the mirrors that they had."""
    folder = tmp_path_factory.mktemp("lost")
    made = new_machines(folder / "launcher")
    return made, made.train(folder / "lost", dies=16, parallel="fsdp")


@pytest.fixture
def after(lost, machines):
    """New machines for that job, with a store in which lies what the lost ones left."""
    theirs, ours = lost[0].side.container, machines.side.container
    for blob in theirs.listing(""):
        ours.put(blob.name, theirs.get(blob.name).data, metadata=theirs.head(blob.name).metadata)
    machines.side.pull()
    machines.attempt = lost[0].attempt
    return machines


@pytest.fixture(scope="module")
def unbroken(forks, tokens, tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("jobs") / "unbroken", tokens, BATCH, execution={"parallel": "fsdp"})
    assert forks(job) == [0, 0], said_by(job)
    return job


def came(mirror):
    """Names and bytes of the checkpoints' large files that came to a machine."""
    told = read_json(mirror.node / "came.json") or {"files": 0, "bytes": 0}
    return told["files"], told["bytes"]


def test_machines_that_replace_others_have_only_their_own_ranks_shards_come(lost, after, unbroken, tmp_path):
    before, machines = lost[1], after
    shards = [f"checkpoints/step-00000016/attempt-1/shard-{rank}.safetensors" for rank in range(2)]
    assert [sorted(path.name for path in mirror.local.rglob("step-00000016/*/shard-*")) for mirror in before] == [
        ["shard-0.safetensors"],
        ["shard-1.safetensors"],
    ], "no machine gets another's shard while it trains"
    sizes = [(before[rank].local / shards[rank]).stat().st_size for rank in range(2)]

    others = machines.train(tmp_path / "others", parallel="fsdp")
    assert [came(mirror) for mirror in others] == [(1, size) for size in sizes]
    job = others[0].local
    assert result(job)["resumed_from_step"] == 16
    assert numbers(job) == numbers(unbroken), "bit for bit, and with the records of the machines before"
    behind = [line["store_behind_steps"] for line in all_lines(job)]
    assert max(behind) <= EVERY and result(job)["store_behind_seconds"] > 0, "with every save waited for, one interval"
    kept = {name.rpartition("/")[0] for name in machines.stored("manifest.json")}
    assert len(kept) == 2 and {name.rpartition("/")[0] for name in machines.stored(".safetensors")} == kept
    assert len(machines.stored(".safetensors")) == 4, (
        "what retention deletes on the leader is deleted in the store, of all"
    )


def test_machines_that_divide_the_network_otherwise_have_all_of_it_come(after, unbroken, tmp_path):
    machines = after
    whole = machines.train(tmp_path / "whole", dies=20, parallel="ddp")
    assert [came(mirror)[0] for mirror in whole] == [2, 2]
    (alone,) = machines.train(tmp_path / "alone", ranks=1, parallel="ddp")
    assert came(alone)[0] == 2 and result(alone.local)["resumed_from_step"] == 16
    found, wanted = numbers(alone.local), numbers(unbroken)
    assert list(found) == list(wanted)
    for step in wanted:
        assert found[step][:3] == pytest.approx(wanted[step][:3], rel=1e-3), step


def test_a_shard_that_is_bad_in_the_store_is_passed_over_by_all_machines(after, unbroken, tmp_path):
    machines = after
    bad = "jobs/one/checkpoints/step-00000016/attempt-1/shard-1.safetensors"
    data = bytearray(machines.side.container.get(bad).data)
    data[-1] ^= 1
    machines.side.container.remove(bad)
    machines.side.container.put(bad, bytes(data))
    others = machines.train(tmp_path / "others", parallel="fsdp")
    job = others[0].local
    assert result(job)["resumed_from_step"] == 8
    assert "shard-1" in read_json(job / "checkpoints/step-00000016/attempt-1/quarantined.json")["reason"]
    assert numbers(job) == numbers(unbroken)


@pytest.mark.long
def test_a_machine_has_those_of_deepspeeds_files_come_that_its_ranks_read(machines, forks, tokens, tmp_path):
    """They are written by each rank on its own disk: the weights of stage 1 by rank 0 for all, the rest by rank for itself."""
    machines.config = BATCH.model_copy(update={"engine": "deepspeed"})
    execution = {"deepspeed": {"zero_stage": 1}}
    whole = write_job(tmp_path / "unbroken", tokens, machines.config, **settings(machines.config, execution))
    assert forks(whole) == [0, 0], said_by(whole)
    lost = machines.train(tmp_path / "lost", dies=16, **execution)
    assert own_files(lost[1]) == ["generator-1.safetensors", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    others = machines.train(tmp_path / "others", **execution)
    assert result(others[0].local)["resumed_from_step"] == 16
    assert [came(mirror)[0] for mirror in others] == [3, 3]
    assert numbers(others[0].local) == numbers(whole), "bit for bit"


@pytest.mark.long
def test_another_stage_of_zero_has_all_of_deepspeeds_files_come(machines, tmp_path):
    """At stage 3 each rank has a file of weights, too, which no other reads; another stage takes all of them over."""
    machines.config = BATCH.model_copy(update={"engine": "deepspeed"})
    machines.train(tmp_path / "lost", dies=16, deepspeed={"zero_stage": 3})
    others = machines.train(tmp_path / "others", dies=18, deepspeed={"zero_stage": 3})
    assert [came(mirror)[0] for mirror in others] == [3, 3]
    assert own_files(others[1]) == [
        "generator-1.safetensors",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ]
    two = machines.train(tmp_path / "two", deepspeed={"zero_stage": 2})
    assert [came(mirror)[0] for mirror in two] == [6, 6] and result(two[0].local)["resumed_from_step"] == 16


def own_files(mirror):
    """Names of the files of DeepSpeed's that lie on a machine's disk, of step 16."""
    return sorted({path.name for path in mirror.local.rglob("step-00000016/*/own/**/*") if path.is_file()})


def test_a_store_that_is_too_far_behind_ends_the_run_with_a_reason(forks, tokens, tmp_path):
    """Nobody sends anything here: a mirror that is stuck."""
    job = write_job(tmp_path / "job", tokens, BATCH, every=4, execution={"parallel": "ddp"})
    agree_to(job, max_lag_seconds=0.5, ranks_per_node=2)
    assert forks(job, fault=WAITS) == [1, 1], said_by(job)
    assert "3 checkpoints in a row failed" in error(job)["message"]
    assert "is not in the store after 0.5 s" in error(job)["message"]
    assert all_lines(job)[-1]["store_behind_steps"] >= 12


def test_a_machine_whose_receipt_does_not_come_is_a_save_that_failed(tmp_path):
    root = tmp_path / "checkpoints"
    agree_to(tmp_path, max_lag_seconds=0.2, ranks_per_node=1)
    claim_attempt(root, 1)
    writing = Writing(root=str(root), rank=0, world_size=2, attempt=1, keep=2, log="", identity={})
    with pytest.raises(
        OSError, match=r"receipt-1.json is not in the store after 0.2 s \(cluster.mirror.max_lag_minutes\)"
    ):
        writing.save(4, 48)
    assert not manifests(root)
