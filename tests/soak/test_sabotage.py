"""A promise that is broken on purpose makes exactly its fault of `headway rehearse` fail: `make soak ARGS=tests/soak`.

Each sabotage is a text that is replaced in a copy of the tree, as in benchmarks/mutants.py. Beside its fault another one is
rehearsed, which must pass.
"""

import json
import subprocess
from pathlib import Path

import pytest
from support import HEADWAY
from waiting import limit

from benchmarks.mutants import Mutant, copy_tree, environment

CONTROLS = ("secret-given", "overload")
"""The one that is not sabotaged is rehearsed, too."""
SABOTAGES = (
    Mutant(
        "checkpoint-flipped",
        "tasks/jobs/checkpoint/files.py",
        'if hashlib.sha256(data).hexdigest() != entry["blocks"][number]:',
        "if False:",
        "Bytes of a checkpoint are not looked at: training resumes from the damaged one.",
    ),
    Mutant(
        "artifact-flipped",
        "tasks/storage/manifest.py",
        "if actual != entry.sha256:",
        "if False:",
        "Bytes of an artifact are not looked at.",
    ),
    Mutant(
        "eviction-notice",
        "tasks/jobs/training/stops.py",
        "noticed = self.notices is not None and self.notices.noticed",
        "noticed = False",
        "The notice is read, and nothing comes of it.",
    ),
    Mutant(
        "server-killed",
        "tasks/serving/servers.py",
        "RESTARTS = 5",
        "RESTARTS = 0",
        "A server of the endpoint that dies stays dead.",
    ),
    Mutant(
        "key-revoked",
        "tasks/serving/keys.py",
        "{key.sha256: key for key in self.keys if key.revoked is None}",
        "{key.sha256: key for key in self.keys}",
        "A revoked key is as good as before.",
    ),
    Mutant(
        "secret-given",
        "tasks/common/redaction.py",
        "    result = secret_settings(settings)\n    if result:",
        "    result = secret_settings(settings)\n    if False:",
        "Secrets in settings are not refused.",
    ),
    Mutant(
        "orchestrator-killed",
        "tasks/compute/supervisor.py",
        "if generation is None:\n            return self._begin(self.job, None)",
        "if generation is None or not generation.end:\n            return self._begin(self.job, generation)",
        "A job that is at work is submitted once more instead of adopted.",
    ),
    Mutant(
        "rank-killed",
        "tasks/compute/local.py",
        "restarts=job.restarts,",
        "restarts=0,",
        "A job's parent starts no rank again.",
    ),
    Mutant(
        "gpu-fails",
        "tasks/jobs/node/probes.py",
        'fault = next((finding for finding in findings if finding.level == "fail"), None)',
        "fault = None",
        "What is wrong with a machine is written down, and nothing comes of it.",
    ),
    Mutant(
        "rank-hangs",
        "tasks/compute/job_monitor.py",
        "still = now - self._moved",
        "still = 0.0",
        "Nothing ever hangs.",
    ),
    Mutant(
        "clock-moved",
        "tasks/compute/job_monitor.py",
        "of_attempt = self._steps or float(",
        "of_attempt = float(",
        "Steps of a machine whose clock was set back do not count.",
    ),
    Mutant(
        "canary-wrong",
        "tasks/serving/protocol/judge.py",
        "if apart > self._config.max_output_shift:",
        "if False:",
        "Answers of the new model are not compared with those of the old one.",
    ),
    Mutant(
        "webhook-forged",
        "deployments/bridge/senders.py",
        "if not any([hmac.compare_digest(one, right) for one in given]):",
        "if False:",
        "Any signature is as good as the right one.",
    ),
)


@pytest.mark.soak
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda one: one.name)
def test_the_fault_of_a_broken_promise_fails_alone(tmp_path, sabotage):
    tree = copy_tree(tmp_path / "tree", sabotage)
    control = next(name for name in CONTROLS if name != sabotage.name)
    words = ["rehearse", "--only", sabotage.name, "--only", control, "--json", "--keep"]
    ran = subprocess.run(
        [HEADWAY, *words],
        cwd=tmp_path,
        env=environment(tree) | {"HEADWAY_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=limit(900),
    )
    verdicts = {result["name"]: result["verdict"] for result in json.loads(ran.stdout)["results"]}
    assert verdicts == {sabotage.name: "failed", control: "passed"}, ran.stderr
    assert ran.returncode == 3


@pytest.mark.unit
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda one: one.name)
def test_each_sabotage_fits_the_code(sabotage):
    sabotage.around(Path(__file__).parents[2])
