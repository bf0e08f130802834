"""The images themselves, built here on Debian's packages, and every program that runs in one started in it.

Files are read-only but for what a test mounts, the user is the image's, and nothing of this checkout is there: built_images.py.
"""

import json
import os
import signal
import subprocess
import urllib.request
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import pytest
from built_images import Built, require_builder
from stand import Running, free_ports
from tiny_model import PROMPTS, export_tiny, make_checkpoint, whole_version
from training_runs import CONFIG, result, write_tokens
from waiting import limit, until

from benchmarks.images import ROOT, named_paths, pip_settings
from tasks.compute.job import Job
from tasks.compute.nodes import write_nodes
from tasks.config.engines.deepspeed import ds_config
from tasks.config.training import DeepspeedConfig, ExecutionConfig
from tasks.hardware.sku import load_sku

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

IMPORT_ALL = """
import importlib, pkgutil, sys
failed = {}
def look(name):
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
        return
    for one in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        if not one.name.startswith(left_out):
            look(one.name)
left_out = tuple(sys.argv[2].split(","))
for name in sys.argv[1].split(","):
    look(name)
print(failed)  # last: libraries print while they are imported
"""
SERVING = "tasks.jobs.serve,tasks.jobs.serving,tasks.jobs.gateway,tasks.jobs.routing"
PROGRAMS = {
    "cluster-cpu": ("tasks.jobs,tasks.common.process", SERVING),
    "endpoint": (SERVING, "-"),
    "orchestrator": ("tasks,flows,deployments", "tasks.jobs,tasks.compute.ray"),
    "platform": (
        "tasks,flows,deployments",
        "tasks.jobs.ray,tasks.compute.ray,tasks.jobs.training.deepspeed_engine,tasks.jobs.evaluation.lm_eval_model",
    ),
}
"""Of which packages each image's programs are, and which modules below them run elsewhere or need an extra that it lacks."""


@pytest.fixture(scope="module")
def image():
    """Images by name, each built when nobody has, and mounted once."""
    require_builder()
    built: dict[str, Built] = {}

    def of(name):
        if name not in built:
            built[name] = Built(name)
        return built[name]

    yield of
    for one in built.values():
        one.close()


def ok(ran):
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout.strip()


@pytest.mark.parametrize("name", [*PROGRAMS, "development"])
def test_an_image_runs_as_nobody_in_particular_and_holds_nothing_of_the_machine_that_built_it(image, name):
    one = image(name)
    uid = one.user.split(":")[0]
    assert ok(one.run("id", "-u")) == uid != "0"
    assert "Read-only file system" in one.run("touch", "/opt/new").stderr
    assert "CapEff:\t0000000000000000" in ok(one.run("cat", "/proc/self/status"))
    settings, described = pip_settings(), json.dumps(one.config)
    assert [value for value in settings.values() if "://" in value and value in described] == []
    assert not (one.root / "etc/pip.conf").exists() and not [*one.root.glob("root/.cache/*")]
    for path in map(Path, named_paths(settings)):
        left = one.root / path.relative_to("/")
        if path.is_dir():
            assert not left.exists() or not [*left.iterdir()], f"{left} was mounted, and is no part of the image"
        else:
            assert not left.exists() or left.read_bytes() != path.read_bytes(), f"{left} is this machine's"


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_that_its_programs_import_is_in_the_image(image, name):
    ran = image(name).run("python", "-c", IMPORT_ALL, *PROGRAMS[name], network=False, seconds=300)
    assert ok(ran).splitlines()[-1] == "{}"


@pytest.mark.parametrize("name", ["cluster-cpu"])
def test_the_image_of_a_node_is_healthy_and_says_what_it_is(image, name):
    one = image(name)
    ok(one.run(*one.health_check(), network=False))
    assert "PyTorch version: 2.13.0" in ok(one.run(*one.default(), network=False))


def test_a_checkout_is_checked_and_tested_in_the_image_of_development(image, tmp_path):
    """The packages that `make install` would bring there are this machine's, for the same Python, beside the checkout."""
    one, packages = image("development"), Path(pytest.__file__).parents[1]
    assert packages.parent.name == "python" + ok(
        one.run("python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    )
    (tmp_path / "checkout").mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(
        ["tar", "--create", "--null", "--files-from=-", f"--file={tmp_path}/files.tar"],
        cwd=ROOT,
        input=files,
        check=True,
    )
    subprocess.run(["tar", "--extract", f"--file={tmp_path}/files.tar"], cwd=tmp_path / "checkout", check=True)
    how = {
        "mounts": {"/workspace": tmp_path / "checkout"},
        "read_only": {"/packages": packages},
        "PYTHONPATH": "/packages:.",
    }

    def inside(words):
        return ok(one.run("sh", "-ec", f"cd /workspace && {words}", seconds=400, **how))

    inside("git init --quiet && git add . && make --dry-run check test")
    inside("python -m benchmarks.structure")
    assert " passed" in inside(
        "python -m pytest -p no:cacheprovider -q -m unit tests/unit/test_*.py tests/unit/tasks/planning"
    )
    inside(
        "python -c 'import deployments.cli.commands, flows.retrain, tasks.jobs.train, torch, prefect, mlflow, onnxruntime'"
    )
    server = "$(ls -d /usr/lib/postgresql/*/bin)"
    inside(f"{server}/initdb -D /tmp/data >/dev/null && {server}/pg_ctl -D /tmp/data -o '-k /tmp -h \"\"' -w start && "
           f"psql -h /tmp -d postgres -Atc 'SELECT 1' && {server}/pg_ctl -D /tmp/data -m fast stop")  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


def as_published(folder):
    """Everybody may read the files, as the store leaves them; libraries write theirs for their owner."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o444)
    return folder


def run_job(one, folder, program, settings, *, ranks=1, inputs=None, user="", **fields):
    """A job in an image as a backend starts it on a machine: the parent, the agent below it, the launcher, the ranks."""
    job = Job(
        name="test", token="a" * 32, program=program, settings=settings, ranks_per_node=ranks, image="headway", restarts=0,
        inputs={name: f"/inputs/{name}" for name in inputs or {}}, **fields,
    )  # fmt: skip
    folder.mkdir()
    for path in (inputs or {}).values():
        as_published(path)
    write_nodes(job, folder, seen="/job")
    ran = one.run(
        "python", "-m", "tasks.common.process", "/job/nodes/0", network=False, seconds=400,
        mounts={"/job": folder}, read_only={f"/inputs/{name}": path for name, path in (inputs or {}).items()},
        user=user, HEADWAY_LEADER="127.0.0.1", HEADWAY_NODE_NAME="container", PYTHONSAFEPATH="1",
    )  # fmt: skip
    logs = "".join(path.read_text() for path in [*folder.glob("**/*.log"), *folder.glob("errors/*.json")])
    assert ran.returncode == 0 and (folder / "result.json").exists(), ran.stderr + logs[-6000:]
    return result(folder)


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_two_ranks_train(image, tmp_path, tokens, launcher):
    settings = {"training": CONFIG.model_dump(mode="json"), "checkpoint_every_steps": 20, "keep_checkpoints": 2}
    one, inputs = image("cluster-cpu"), {"tokens": tokens}
    trained = run_job(one, tmp_path / "job", "tasks.jobs.train", settings, ranks=2, inputs=inputs, launcher=launcher)
    assert trained["metrics"]["loss"] < 4 and [*(tmp_path / "job" / "out").rglob("*.safetensors")]


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
@pytest.mark.parametrize("user", ["0:0", "9000:9000"])
def test_a_job_runs_as_whoever_a_service_makes_of_it(image, tmp_path, tokens, user, launcher):
    """Root, as in Microsoft's own images, or a user that the image does not know, as Azure ML's serverless nodes have it."""
    settings = {"training": CONFIG.model_dump(mode="json"), "checkpoint_every_steps": 20, "keep_checkpoints": 2}
    one, how = image("cluster-cpu"), {"inputs": {"tokens": tokens}, "ranks": 2, "launcher": launcher, "user": user}
    assert run_job(one, tmp_path / "job", "tasks.jobs.train", settings, **how)["metrics"]["loss"] < 4
    words = (
        "import getpass, os; print(getpass.getuser(), os.getuid(), os.path.expanduser('~'), os.access('.', os.W_OK))"
    )
    home = {"/home/headway": tmp_path / "home"}  # as it is in a container whose files may be written to
    (tmp_path / "home").mkdir()
    said = ok(one.run("python", "-c", words, user=user, mounts=home)).split()
    assert said == ["headway", user.partition(":")[0], "/home/headway", "True"]
    mode = ok(one.run("stat", "--format", "%a", "/home/headway", user=user))
    assert mode == "1777"


def test_two_ranks_train_with_deepspeed(image, tmp_path, tokens):
    config = CONFIG.model_copy(update={"engine": "deepspeed", "micro_batch_size": 2})
    execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=2))
    settings = {"training": config.model_dump(mode="json"), "execution": execution.model_dump(mode="json")}
    settings |= {"deepspeed": ds_config(config, execution), "checkpoint_every_steps": 20, "keep_checkpoints": 2}
    trained = run_job(
        image("cluster-cpu"), tmp_path / "job", "tasks.jobs.train", settings, ranks=2, inputs={"tokens": tokens},
        environment={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert trained["metrics"]["loss"] < 4


def test_ray_starts_and_runs_a_task(image):
    """What `azureml.ray` starts on a node. Ray's Java is no part of the image."""
    start = (
        "ray start --head --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=80000000 --disable-usage-stats"
    )
    task = "import ray; ray.init('auto'); print('task', ray.get(ray.remote(lambda: 6 * 7).remote()))"
    ran = image("cluster-cpu").run(
        "sh", "-ec", f'{start} && python -c "{task}" && ray stop', network=False, seconds=300,
        RAY_raylet_start_wait_time_s="120", RAY_memory_monitor_refresh_ms="0",
    )  # fmt: skip
    assert "task 42" in ok(ran)


def test_a_machine_is_qualified(image, tmp_path):
    network = {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
    settings = {
        "benchmark": {"matmul_size": 128, "largest_megabytes": 1, "seconds": 0.5, "rounds": 1},
        "sku": load_sku("local-cpu").model_dump(mode="json"),
        "training": {"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2, "network": network},
        "threads": 1,
        "vocab_size": 320,
    }
    run_job(image("cluster-cpu"), tmp_path / "job", "tasks.jobs.benchmark", settings, ranks=2)
    assert [*(tmp_path / "job" / "out").iterdir()]


def test_a_checkpoint_is_exported(image, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    export = {"golden_prompts": PROMPTS, "golden_tokens": 24, "variants": [], "speed_seconds": 0.1}
    settings, inputs = {"export": export, "threads": 1}, {"checkpoint": make_checkpoint(tmp_path / "checkpoint")}
    run_job(image("cluster-cpu"), tmp_path / "job", "tasks.jobs.export", settings, inputs=inputs)
    assert (tmp_path / "job" / "out" / "golden.json").exists() and (tmp_path / "job" / "out" / "model.onnx").exists()


def test_an_endpoint_answers_with_the_version_that_it_verified(image, tmp_path):
    """As its container is started: the entry point, the whole version mounted, and every byte compared with its manifest."""
    one, port = image("endpoint"), free_ports("endpoint")["endpoint"]
    model = export_tiny(tmp_path / "made")
    ref = whole_version(model, tmp_path / "mounted")
    (tmp_path / "run").mkdir()
    how = {"mounts": {"/run/headway": tmp_path / "run"}, "read_only": {"/model": tmp_path / "mounted"}}
    (as_published(tmp_path / "mounted") / "files" / "parity.json").chmod(0o600)
    assert (
        "parity.json cannot be read by user 10001: let everybody" in one.run(*one.default(), **how, seconds=20).stderr
    )
    as_published(tmp_path / "mounted")
    argv = one.command(*one.default(), **how, MODEL_REF=ref, PORT=str(port))
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(
            lambda: server.poll() is not None or one.run(*one.health_check(), PORT=str(port)).returncode == 0,
            60, every=1, why=(tmp_path / "log").read_text,
        )  # fmt: skip
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
        golden = json.loads((model / "golden.json").read_text())["prompts"][0]
        body = json.dumps({"prompt": golden["prompt"], "max_tokens": len(golden["tokens"])}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            completion = json.load(answer)
        assert (completion["model"], completion["choices"][0]["text"]) == (ref, golden["completion"])
    finally:
        server.kill()
        server.wait()


# --- the services of compose.yaml, each in its image's root; PostgreSQL is this machine's


class InImages:
    """Starts services as `stand` does, in their images instead of in virtual environments."""

    def __init__(self, stand, image):
        self.stand, self.image = stand, image

    def command(self, name, *words):
        """What `docker compose exec` starts; without words what `docker compose up` starts."""
        service = self.stand.services[name]
        one = self.image("platform" if name == "headway" else "orchestrator")
        places = self.stand.folders(name, service)
        bound = {mount["target"] for mount in service["volumes"] if mount["type"] == "bind"}
        volumes = {target: path for target, path in places.items() if target not in bound and target != "/tmp"}
        env = {key: self.stand.here(name, value, {}) for key, value in service["environment"].items()}
        argv = words or [*one.config["Entrypoint"], *(self.stand.here(name, word, {}) for word in service["command"])]
        read_only = {target: places[target] for target in bound}
        for path in read_only.values():
            path.chmod(0o444)
        return one.command(*argv, mounts=volumes, read_only=read_only, host=service.get("hostname", name), **env)

    def start(self, name):
        told = self.stand.services[name].get("healthcheck", {}).get("test")
        check = (
            [self.stand.here(name, word, {}) for word in told[1:]] if told else self.image("platform").health_check()
        )
        log = self.stand.folder / f"{name}-image.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                self.command(name), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        healthy = self.command(name, *check)
        return Running(name, process, log, lambda: subprocess.run(healthy, capture_output=True).returncode == 0)

    def kill_what_is_left(self):
        """Processes with a group of their own, by the passwords that no other test's have in their environment."""
        environments = [service["environment"] for service in self.stand.services.values()]
        passwords = [value.encode() for each in environments for key, value in each.items() if key.endswith("PASSWORD")]
        assert all(len(password) >= 16 for password in passwords), "drawn by docker/make-env.sh"
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                held = (entry / "environ").read_bytes()
                if any(password in held for password in passwords):
                    os.kill(int(entry.name), signal.SIGKILL)

    def ok(self, *words):
        ran = subprocess.run(self.command("headway", *words), capture_output=True, text=True, timeout=limit(900))
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        return ran.stdout


@pytest.fixture(scope="module")
def servers_in_images(stand, database, image):
    """The servers of Prefect and MLflow, healthy."""
    inside, running = InImages(stand, image), []
    try:
        for name in ("prefect", "mlflow"):
            running.append(inside.start(name))
            running[-1].wait(240)
        yield inside
    finally:
        for one in running:
            one.stop()
        inside.kill_what_is_left()


@pytest.fixture(scope="module")
def platform(servers_in_images):
    """And `headway up`, healthy."""
    running = servers_in_images.start("headway")
    try:
        running.wait(400)
        yield servers_in_images
    finally:
        down = servers_in_images.command("headway", "headway", "down", "--yes", "--endpoints")
        subprocess.run(down, timeout=limit(90), capture_output=True)
        running.stop()


def test_the_servers_of_prefect_and_mlflow_in_their_image_stand_on_postgresql(servers_in_images, database):
    for name in ("prefect", "mlflow"):
        secret = servers_in_images.stand.services[name]["environment"]["PGPASSWORD"]
        argv = ["psql", "--no-psqlrc", "-At", "-U", name, "-d", name, "-c", "SELECT count(*) > 0 FROM alembic_version"]
        ran = subprocess.run(argv, env={**database, "PGPASSWORD": secret}, capture_output=True, text=True)
        assert ran.stdout.strip() == "t", ran.stderr


def test_headway_up_in_its_image_registers_the_deployments(platform):
    url = f"http://127.0.0.1:{platform.stand.ports['prefect:4200']}/api/deployments/filter"
    login = platform.stand.services["prefect"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", headers), timeout=limit(20)) as answer:
        assert {"tiny", "local"} <= {one["name"] for one in json.load(answer)}


def test_a_model_is_trained_exported_and_deployed_inside_the_image_of_the_platform(platform):
    """The whole tiny lifecycle: its jobs run on the local backend, below the worker's image."""
    library = "/usr/lib/python3.11"
    folders = [f"{library}/{name}" for name in ("json", "email", "logging", "importlib")]
    platform.ok("headway", "dataset", "publish", "tiny", *folders, "--include", "*.py")
    ran = json.loads(platform.ok("headway", "retrain", "-c", "tiny", "--json"))
    assert {stage["status"] for stage in ran["stages"]} == {"ran"}
    platform.ok("headway", "verify", "model/tiny")
    assert platform.ok("headway", "complete", "tiny", "def ")
