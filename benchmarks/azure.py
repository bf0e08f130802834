"""A smoke test on a real subscription, for about a dollar: `make azure`, or `python -m benchmarks.azure`.

    python -m benchmarks.azure [--region REGION] [--yes] [--to FILE] [--minutes N]
    python -m benchmarks.azure -c mine.yaml --store store.yaml ...     in a workspace that is there

Makes a resource group with a storage account, a registry, two identities, a workspace and a cluster of two small machines; runs
the tiny lifecycle there by the product's own commands: a job on two nodes, one that is cancelled and resumed, an endpoint that is
asked; and deletes the group. Every step names what it proves and what it costs, by the prices that `headway plan` uses. It asks
before it spends anything, has a time limit, and deletes what it made after a failure and after Ctrl-C too; what could not be
deleted is named with the command that does it, and the next run deletes it, and what a run that was killed left. You need the
Azure CLI, signed in, *Owner* of the subscription, and the images of `make images ARGS="cluster-cpu endpoint"`. See docs/azure.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from benchmarks import images
from benchmarks.azure_undo import END_SECONDS, Made, Undo, at_work, broken_off, end_commands
from benchmarks.proof import Failed, Proof, Skipped, Step, command, end, tail
from tasks.config.files import load
from tasks.planning.prices.book import machine_price, open_book

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "proof" / "azure.md"
HEADWAY = Path(sys.executable).with_name("headway")
IMAGES = ("cluster-cpu", "endpoint")
IDENTITIES = ("headway", "headway-endpoint")
"""Of the cluster, and of the endpoint."""
PRESETS = ("tiny", "azureml")
NODES, SIZE = 2, "Standard_DS3_v2"
REGISTRY_DAY = 0.167
"""USD a day of a registry of the tier Basic: https://azure.microsoft.com/pricing/details/container-registry. No list has it."""
NOBODY = "00000000-0000-0000-0000-000000000000"
"""User name of a login to a registry by a token (az acr login --expose-token)."""
RIGHTS_SECONDS, LOOK_SECONDS = 600.0, 10.0
"""How long new role assignments may take to hold, and between two looks."""
COMMAND_SECONDS = 300.0
"""Of a `headway` command that waits for no job."""
IDLE_SECONDS = 600
"""After which an idle node is given back: it outlasts the time between two steps."""
EVERY = 50
"""Steps between two checkpoints."""
STORE = re.compile(r"az://[^/]+/[^/]+")
TAG = "made-by=headway-smoke-test"
"""Of the resource group."""


class Declined(Exception):
    """Nobody agreed to pay for it."""


@dataclass(frozen=True)
class Prices:
    """USD an hour of one machine; None is not known."""

    node: float | None
    endpoint: float | None


@dataclass
class Cloud:
    """What the smoke test works with. State: `made`, what must be deleted."""

    given: argparse.Namespace
    folder: Path
    """Of this run: the home, the configuration, and what commands printed."""
    subscription: str = ""
    registry: str = ""
    identity: str = ""
    """Of the cluster."""
    endpoint_identity: str = ""
    """It can only read: the endpoint answers strangers."""
    prices: Prices = field(default_factory=lambda: Prices(None, None))

    def __post_init__(self) -> None:
        self.made = Made(self.folder)

    # --- commands

    @property
    def environment(self) -> dict[str, str]:
        return {"HEADWAY_HOME": str(self.folder / "home")}

    def az(self, *words: object, seconds: float = 300.0, undo: Undo | None = None) -> Any:
        """Run `az`; what it prints, as JSON. `undo` is noted first: a command that fails may have made something even so."""
        if undo:
            self.made.note(replace(undo, words=[*undo.words, *self.subscribed]))
        line = ["az", *map(str, words), *self.subscribed, "--only-show-errors", "--output", "json"]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            running = subprocess.Popen(line, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError as error:
            raise Failed("there is no Azure CLI: https://learn.microsoft.com/cli/azure/install-azure-cli") from error
        try:
            out, err = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"not done after {seconds:.0f} s: {shlex.join(line)}") from error
        finally:
            end(running)
        if running.returncode:
            raise Failed(f"{shlex.join(line[:4])} ...: {' '.join(err.decode().split())[-600:]}")
        return json.loads(out) if out.strip() else None

    @property
    def subscribed(self) -> list[str]:
        """Options that hold `az` to the subscription of the beginning, whatever `az account set` says meanwhile."""
        return ["--subscription", self.subscription] if self.subscription else []

    def start(self, *words: object) -> tuple[subprocess.Popen[bytes], Path]:
        """A `headway` command with --json, and the file that its object will be in."""
        number = len(list(self.folder.glob("[0-9]*.json")))
        output = self.folder / f"{number:02d}-{words[0]}.json"
        with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
            line = [str(HEADWAY), *map(str, words), "--json"]
            running = subprocess.Popen(
                line,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        return running, output

    def headway(self, *words: object, seconds: float, codes: Sequence[int] = (0,)) -> dict[str, Any]:
        """Run a `headway` command to its end. Raises Failed for another exit code than one of `codes`."""
        running, output = self.start(*words)
        return self.result(running, output, seconds=seconds, codes=codes)

    def result(
        self, running: subprocess.Popen[bytes], output: Path, *, seconds: float, codes: Sequence[int] = (0,)
    ) -> dict[str, Any]:
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"not done after {seconds:.0f} s: {tail(output.with_suffix('.log'))}") from error
        finally:
            end(running, END_SECONDS)
        fields: dict[str, Any] = json.loads(output.read_text() or "{}")
        if code not in codes:
            error = fields.get("error") or {}
            raise Failed(
                f"exit code {code}: {error.get('message') or tail(output.with_suffix('.log'))} {error.get('remedy', '')}"
            )
        return fields

    @property
    def configured(self) -> list[str]:
        """The options of every command of the lifecycle."""
        files = [*PRESETS, *self.given.config, str(self.folder / "smoke.yaml"), str(self.folder / "set.yaml")]
        return [word for name in files for word in ("-c", name)]

    def retrain(self, *words: object) -> tuple[subprocess.Popen[bytes], Path]:
        return self.start("retrain", *self.configured, *words)

    def spent(self) -> str:
        """What the newest run cost, by `headway cost`."""
        size = ["--sku", self.given.size] if self.given.size else []
        told = self.headway("cost", *size, "--region", self.given.region, seconds=COMMAND_SECONDS)
        known, currency = told.get("known"), told.get("currency") or ""
        return f"{told['machine_hours']:.2f} machine hours, {'cost unknown' if known is None else f'{currency} {known:.2f}'}"

    # --- steps

    def sign_in(self, _: float) -> str:
        """The account, the prices and the images."""
        account = self.az("account", "show")
        self.az("extension", "add", "--name", "ml", "--upgrade")
        self.subscription = str(account["id"])
        try:
            self.headway("prices", "update", "--region", self.given.region, seconds=COMMAND_SECONDS)
        except Failed as reason:
            print(f"prices are those that are known: {reason}", file=sys.stderr)
        self.prices = Prices(self.hour(self.given.size), self.hour(self.given.endpoint_size))
        if not self.has_images:
            lacking = [name for name in IMAGES if not images.exists(images.engine(), images.tag(name))]
            if lacking:
                raise Failed(f"no image {', '.join(lacking)} is here: make images ARGS='{' '.join(IMAGES)}'")
        hour = "of unknown price" if self.prices.node is None else f"at USD {self.prices.node:.3f} an hour"
        return f"{account['name']}; {self.given.size or 'a node'} in {self.given.region} {hour}"

    def hour(self, size: str) -> float | None:
        """USD an hour of a machine, as far as it is known."""
        book, today = open_book(self.folder / "home"), datetime.datetime.now(datetime.UTC).date()
        return machine_price(book, size, region=self.given.region, today=today).hours.get("on-demand") if size else None

    @property
    def has_images(self) -> bool:
        """Whether a registry has the images already."""
        return bool(self.given.config or (self.given.image and self.given.endpoint_image))

    def leftovers(self, seconds: float) -> str:
        """Delete what earlier runs made and could not delete. What another machine may be at work on is only named."""
        gone, left = [], []
        folders = broken_off(self.folder.parent) if self.given.folder is None else ()
        for cloud in chain((replace(self, folder=folder) for folder in folders), [self] if self.made else []):
            try:
                gone.append(cloud.delete(seconds))
            except Failed as reason:
                left.append(str(reason))
        if left:
            raise Failed("; ".join(left))
        groups = [str(one["name"]) for one in self.az("group", "list", "--tag", TAG)]
        others = [f"group {name} may be in use: az group delete --name {name} --yes" for name in groups]
        return "; ".join([*gone, *others]) or "nothing is left of earlier runs"

    def resources(self, seconds: float) -> str:
        """A resource group with everything in it, unless there is a workspace."""
        given, group = self.given, self.given.group
        if not given.config and self.az("group", "exists", "--name", group):
            raise Failed(
                f"there is a resource group {group}, and at the end it would be deleted with all that is in it: "
                f"choose another --group, or use a workspace in it with -c FILE --store FILE"
            )
        self.write_store()
        if given.config:
            return f"your workspace and store, below {self.uri}"
        for words, undo in self.creations():
            self.az(*words, seconds=seconds, undo=undo)
        shown = [self.az("identity", "show", "--name", name, "--resource-group", group) for name in IDENTITIES]
        self.identity, self.endpoint_identity = (str(one["id"]) for one in shown)
        return f"{group} in {given.region}: account, registry, identity, workspace {given.workspace}"

    def creations(self) -> list[tuple[list[str], Undo | None]]:
        """Commands that create the group and all in it; the two that must be deleted by themselves with how."""
        given, group = self.given, ["--resource-group", self.given.group]
        where = ["--location", given.region]
        whole = Undo(f"resource group {given.group}", ["az", "group", "delete", "--name", given.group, "--yes"])
        workspace = ["az", "ml", "workspace", "delete", "--name", given.workspace, *group]
        at_once = Undo(f"workspace {given.workspace}", [*workspace, "--permanently-delete", "--yes"])
        account = ["--account-name", given.account]
        commands: list[tuple[list[str], Undo | None]] = [
            (["group", "create", "--name", given.group, *where, "--tags", TAG], whole),
            *((["identity", "create", "--name", name, *group, *where], None) for name in IDENTITIES),
            (["acr", "create", "--name", given.account, *group, *where, "--sku", "Basic"], None),
            (["ml", "workspace", "create", "--name", given.workspace, *group, *where], at_once),
        ]
        if given.store:
            return commands
        flat = ["--enable-hierarchical-namespace", "false", "--allow-blob-public-access", "false"]
        storage = [
            ["account", "create", "--name", given.account, *group, *where, "--kind", "StorageV2", *flat],
            ["account", "blob-service-properties", "update", *account, *group, "--enable-versioning", "true"],
            ["container-rm", "create", "--storage-account", given.account, "--name", "headway", *group],
        ]
        return [*commands, *((["storage", *words], None) for words in storage)]

    def write_store(self) -> None:
        """stores.yaml of the home: the account that is made, or the store that was named, below a prefix of its own."""
        store = {"uri": self.uri, "credential": "cli"}
        if self.given.store:
            store = {**yaml.safe_load(self.given.store.read_text()), "uri": self.uri}
            account, container, prefix = self.uri.removeprefix("az://").split("/", 2)
            words = ["az", "storage", "blob", "delete-batch", "--account-name", account, "--source", container]
            words += ["--pattern", f"{prefix}/*", "--auth-mode", "login", *self.subscribed]
            self.made.note(Undo(f"blobs below {self.uri}", words))
        text = yaml.safe_dump({"use": "smoke", "stores": {"smoke": store}})
        (self.folder / "home" / "stores.yaml").write_text(text)

    @property
    def uri(self) -> str:
        """Where everything is stored."""
        if not self.given.store:
            return f"az://{self.given.account}/headway/smoke"
        return f"{str(yaml.safe_load(self.given.store.read_text())['uri']).rstrip('/')}/{self.folder.name}"

    def push(self, seconds: float) -> str:
        """The images of `make images`, in the new registry."""
        if self.has_images:
            raise Skipped("a registry has the images already")
        token = self.az("acr", "login", "--name", self.given.account, "--expose-token")
        self.registry, program = str(token["loginServer"]), images.engine()
        login = [program, "login", self.registry, "--username", NOBODY, "--password-stdin"]
        if subprocess.run(login, input=token["accessToken"], text=True, capture_output=True, timeout=120).returncode:
            raise Failed(f"{program} could not log in to {self.registry}")
        try:
            for name in IMAGES:
                source, target = images.tag(name), self.pushed(name)
                lines = [[program, "push", source, f"docker://{target}"]]
                if program == "docker":
                    lines = [[program, "tag", source, target], [program, "push", target]]
                for line in lines:
                    if command(line, seconds=seconds, log=self.folder / "push.log"):
                        raise Failed(f"{shlex.join(line)}: {tail(self.folder / 'push.log')}")
        finally:
            subprocess.run([program, "logout", self.registry], capture_output=True, timeout=60)
        return f"{', '.join(IMAGES)} in {self.registry}"

    def pushed(self, name: str) -> str:
        return f"{self.registry}/headway/{name}:{images.VERSION}"

    def cluster(self, seconds: float) -> str:
        """The cluster, and the rights that `headway doctor --rights` prints; nobody may read the store before."""
        given, deadline = self.given, time.monotonic() + seconds
        self.configure()
        if not given.config:
            where = ["--resource-group", given.group, "--workspace-name", given.workspace]
            who = ["--identity-type", "user_assigned", "--user-assigned-identities", self.identity]
            nodes = ["--size", given.size, "--min-instances", 0, "--max-instances", NODES]
            nodes += ["--idle-time-before-scale-down", IDLE_SECONDS]
            cluster = ["--name", "smoke", "--type", "AmlCompute", *nodes]
            self.az("ml", "compute", "create", *cluster, *where, *who, seconds=seconds)
            rights = self.folder / "rights.sh"
            script = subprocess.run(
                [str(HEADWAY), "doctor", *self.configured, "--rights"],
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
            )
            rights.write_text(script.stdout)
            if script.returncode or command(["bash", rights], seconds=seconds, log=self.folder / "rights.log"):
                raise Failed(f"{script.stderr.strip() or tail(self.folder / 'rights.log')}")
        findings = self.in_order(min(deadline, time.monotonic() + RIGHTS_SECONDS))
        self.publish()
        return f"{findings} findings of headway doctor, all in order"

    def in_order(self, deadline: float) -> int:
        """Wait until `headway doctor` finds nothing wrong: rights hold some minutes after they were given."""
        while True:
            told = self.headway("doctor", *self.configured, seconds=COMMAND_SECONDS, codes=(0, 6))
            bad = [f"{one['name']}: {one['said']}" for one in told["findings"] if not one["ok"]]
            if not bad:
                return len(told["findings"])
            if time.monotonic() > deadline:
                raise Failed("; ".join(bad))
            time.sleep(LOOK_SECONDS)

    def configure(self) -> None:
        """The files of settings: what the smoke test needs, and last what --set says."""
        (self.folder / "smoke.yaml").write_text(yaml.safe_dump(self.settings()))
        changed: dict[str, Any] = {}
        for one in self.given.set:
            name, _, value = one.partition("=")
            *above, last = name.split(".")
            section = changed
            for key in above:
                section = section.setdefault(key, {})
            section[last] = yaml.safe_load(value)
        (self.folder / "set.yaml").write_text(yaml.safe_dump(changed))

    def publish(self) -> None:
        files = [ROOT / name for name in ("flows", "tasks", "deployments")]
        self.headway("dataset", "publish", "tiny", *files, "--include", "*.py", seconds=COMMAND_SECONDS)

    def settings(self) -> dict[str, Any]:
        """What the smoke test adds to the shipped `tiny` and `azureml`, or to your own files: of these it changes no place."""
        given = self.given
        image = given.image or (self.pushed("cluster-cpu") if self.registry else "")
        serving = given.endpoint_image or (self.pushed("endpoint") if self.registry else "")
        cluster: dict[str, Any] = {"name": "smoke", "nodes": NODES, "time_limit_minutes": 30}
        endpoint: dict[str, Any] = {"expires_hours": 3}
        cluster |= {"image": image} if image else {}
        endpoint |= {"image": serving} if serving else {}
        if not given.config:
            where = {"subscription_id": self.subscription, "resource_group": given.group, "workspace": given.workspace}
            nodes = {"compute": "smoke", "size": given.size, "shm_size": "2g", "cluster_identity": self.identity}
            cluster["azureml"] = where | nodes
            endpoint |= {"instance_type": given.endpoint_size, "identity": self.endpoint_identity}
        return {
            "cluster": cluster,
            "benchmark": {"checks": ["health", "compute", "collectives"], "seconds": 0.5},  # two nodes are one pair
            "training": {"model": "smoke", "steps": given.steps},
            "planning": {"checkpoint": {"every_steps": EVERY}, "spending": {"region": given.region}},
            "deployment": {"backend": "azureml", "endpoint": given.endpoint, "azureml": endpoint},
        }

    def two_nodes(self, seconds: float) -> str:
        running, output = self.retrain("--to", "benchmark")
        told = self.result(running, output, seconds=seconds)
        [stage] = [one for one in told["stages"] if one["name"] == "benchmark"]
        rates = {name: value for name, value in stage["metrics"].items() if isinstance(value, int | float)}
        usable = rates.get("machines_usable", rates.get("usable"))
        seen = ", ".join(f"{name} {value:.3g}" for name, value in sorted(rates.items()))
        if usable is not None and usable != NODES:
            raise Failed(f"{usable} of {NODES} machines are usable: {seen}")
        return f"{seen}; {self.spent()}"

    def cancel(self, seconds: float) -> str:
        """Cancelled by `headway job cancel`, once a checkpoint is there."""
        deadline = time.monotonic() + seconds
        running, output = self.retrain("--to", "train")
        try:
            entry = self.training(running, output, deadline, beyond=EVERY)
            self.headway("job", "cancel", entry["id"], "--reason", "the smoke test cancels it", seconds=COMMAND_SECONDS)
            told = self.result(running, output, seconds=max(1.0, deadline - time.monotonic()), codes=(4, 130))
        finally:
            end(running, END_SECONDS)
        return f"{entry['id']} was cancelled at step {entry['step']}; exit code {told['exit_code']}"

    def training(
        self, running: subprocess.Popen[bytes], output: Path, deadline: float, *, beyond: int
    ) -> dict[str, Any]:
        """The job that trains, once it is beyond a step."""
        while time.monotonic() < deadline:
            if running.poll() is not None:
                raise Failed(f"the training ended before it was stopped: {tail(output.with_suffix('.log'))}")
            jobs = self.headway("jobs", seconds=COMMAND_SECONDS)["jobs"]
            running_now = [one for one in jobs if one["stage"] == "train" and one["state"] == "running"]
            if seen := [one for one in running_now if (one["step"] or 0) > beyond]:
                return dict(seen[0])
            time.sleep(1.0)
        raise Failed(f"no training came beyond step {beyond}: {tail(output.with_suffix('.log'))}")

    def resume(self, seconds: float) -> str:
        """The same command again; it is killed while it watches the job, and a third one adopts that."""
        deadline = time.monotonic() + seconds
        running, output = self.retrain("--to", "train")
        try:
            self.training(running, output, deadline, beyond=EVERY)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        again, output = self.retrain("--to", "train")
        told = self.result(again, output, seconds=max(1.0, deadline - time.monotonic()))
        [stage] = [one for one in told["stages"] if one["name"] == "train"]
        job = stage["job"] or {}
        if not job.get("resumed_from_step"):
            raise Failed(f"training began at step 0 again: {job}")
        if not job["adopted"]:
            raise Failed(f"the job was not adopted after its supervisor was killed: {job}")
        return f"resumed from step {job['resumed_from_step']}, adopted after kill -9; {self.spent()}"

    def endpoint(self, seconds: float) -> str:
        name = self.given.endpoint
        self.made.note(Undo(f"endpoint {name}", [str(HEADWAY), "endpoint", "stop", name], self.environment))
        running, output = self.retrain()
        told = self.result(running, output, seconds=seconds)
        return f"{told['endpoint']['model']} on {told['endpoint']['url']}; {self.spent()}"

    def ask(self, seconds: float) -> str:
        told = self.headway("complete", self.given.endpoint, "def ", seconds=seconds)
        if not told["completion"]:
            raise Failed("the endpoint answered nothing")
        return f"{told['prompt']!r} is continued with {told['completion'][:60]!r} by {told['model']}"

    # --- the end

    def delete(self, seconds: float) -> str:
        """Everything that was made, the newest first. Raises Failed with the commands for what could not be deleted."""
        began = (self.folder / "smoke.yaml").exists()
        try:
            end_commands(self.folder / "home")
            for job in self.quietly("jobs").get("jobs", []) if began else ():
                self.quietly("job", "cancel", job["id"], "--reason", "the smoke test is over")
        except KeyboardInterrupt:
            print("jobs are left to the deletion of their workspace, or to headway job cancel", file=sys.stderr)
        gone, left = self.made.delete(seconds)
        if began:
            self.quietly("down", "--yes")
        if left:
            raise Failed("not deleted: " + "; ".join(f"{one.what}: {one.line}" for one in left))
        return f"deleted: {', '.join(gone) or 'nothing was made'}"

    def quietly(self, *words: object) -> dict[str, Any]:
        """A `headway` command whose failure changes nothing about what follows."""
        try:
            return self.headway(*words, seconds=COMMAND_SECONDS)
        except (Failed, KeyboardInterrupt, ValueError) as reason:
            print(f"headway {words[0]}: {reason}", file=sys.stderr)
            return {}


@dataclass(frozen=True)
class Paid:
    """A step, and what it pays for."""

    step: Step
    node_minutes: float = 0.0
    """Of all nodes together, as expected."""
    endpoint_minutes: float = 0.0
    more: float = 0.0
    """USD beside them, as expected."""

    def usd(self, prices: Prices) -> float | None:
        """None: a price of it is not known."""
        parts = [(self.node_minutes, prices.node), (self.endpoint_minutes, prices.endpoint)]
        hours = [(minutes / 60, price) for minutes, price in parts if minutes]
        known = [hour * price for hour, price in hours if price is not None]
        return sum(known) + self.more if len(known) == len(hours) else None

    def cost(self, prices: Prices) -> str:
        usd = self.usd(prices)
        return "unknown" if usd is None else f"about USD {usd:.2f}" if usd else "nothing"


def steps_of(cloud: Cloud) -> list[Paid]:
    """In their order. Machines start in three to five minutes, and an endpoint in ten: that is what most of them wait for."""
    minute, made = 60.0, 0.0 if cloud.given.config else REGISTRY_DAY + 0.05
    return [
        Paid(Step("sign in", "the Azure CLI is signed in, prices and images are known", cloud.sign_in, 5 * minute)),
        Paid(Step("leftovers", "nothing of an earlier run is left that costs money", cloud.leftovers, 30 * minute)),
        Paid(Step("resources", "a group, registry and workspace can be made", cloud.resources, 15 * minute), more=made),
        Paid(Step("push", "the images of this checkout are accepted by a registry", cloud.push, 30 * minute)),
        Paid(Step("cluster", "headway doctor finds cluster, identity and rights in order", cloud.cluster, 20 * minute)),
        Paid(
            Step("two nodes", "jobs start, read and write the store, and two nodes talk", cloud.two_nodes, 30 * minute),
            node_minutes=NODES * 12,
        ),
        Paid(
            Step("cancel", "headway job cancel ends a training on the cluster", cloud.cancel, 20 * minute),
            node_minutes=NODES * 6,
        ),
        Paid(
            Step("resume", "it resumes from its checkpoint, and survives its supervisor", cloud.resume, 30 * minute),
            node_minutes=NODES * 8,
        ),
        Paid(
            Step("endpoint", "the model is exported and served by a managed endpoint", cloud.endpoint, 45 * minute),
            node_minutes=NODES * 12,
            endpoint_minutes=30,
        ),
        Paid(Step("ask", "the endpoint answers", cloud.ask, 5 * minute)),
    ]


FREE = 2
"""Steps that need nobody's agreement: they make nothing."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    name = f"headway-smoke-{secrets.token_hex(4)}"
    parser.add_argument("--yes", action="store_true", help="do not ask before money is spent")
    parser.add_argument("--region", help="by default eastus, or with -c planning.spending.region")
    parser.add_argument("--size", help="VM size of nodes and endpoint, whose price counts; by default Standard_DS3_v2")
    parser.add_argument("--group", default=name, help="the resource group that is created, and deleted at the end")
    parser.add_argument("--workspace", default=name, help="the workspace that is created")
    parser.add_argument("--account", default=name.replace("-", ""), help="name of the storage account and the registry")
    parser.add_argument(
        "-c", "--config", nargs="+", default=[], help="your own workspace, cluster, images and identities"
    )
    parser.add_argument("--store", type=Path, help="a YAML file with your own store: uri, credential (docs/storage.md)")
    parser.add_argument("--image", default="", help="image of the jobs that is in a registry already")
    parser.add_argument("--endpoint-image", default="", help="the same of the endpoint")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="a setting; may be repeated")
    parser.add_argument("--steps", type=int, default=3000, help="of the training; it must last a minute")
    parser.add_argument("--minutes", type=float, default=120.0, help="time limit of all steps together")
    parser.add_argument("--to", type=Path, default=PAGE, help=f"the page; by default {PAGE.relative_to(ROOT)}")
    parser.add_argument("--folder", type=Path, help="home and logs of this run; by default below build/azure")
    given = parser.parse_args(words)
    if given.config and not given.store:
        parser.error("-c names a workspace that is there: name its store too, --store FILE")
    if given.store and not STORE.match(uri := str((yaml.safe_load(given.store.read_text()) or {}).get("uri"))):
        parser.error(
            f"--store {given.store}: its uri is {uri} and not az://ACCOUNT/CONTAINER or az://ACCOUNT/CONTAINER/PREFIX"
        )
    try:
        own = load([*PRESETS, *given.config], given.set) if given.config else None
    except ValueError as error:
        parser.error(str(error))
    given.region = given.region or (own.planning.spending.region if own else "") or "eastus"
    given.endpoint_size = given.size or (own.deployment.azureml.instance_type if own else SIZE)
    given.size = given.size or (own.cluster.azureml.size if own else SIZE)
    given.endpoint = f"smoke-{secrets.token_hex(4)}"  # in a shared workspace somebody else may try it too
    return given


def agreed(given: argparse.Namespace, steps: Sequence[Paid], prices: Prices) -> bool:
    """Whether somebody wants to pay for it."""
    print("The next steps create resources in Azure and cost money until they are deleted:", file=sys.stderr)
    for one in steps:
        print(f"  {one.step.name:<10} {one.cost(prices):<16} {one.step.proves}", file=sys.stderr)
    costs = [one.usd(prices) for one in steps]
    unknown = ", and machines of unknown price" if None in costs else ""
    print(f"  together   about USD {sum(cost or 0.0 for cost in costs):.2f}{unknown}", file=sys.stderr)
    if given.yes or not sys.stdin.isatty():
        return bool(given.yes)
    try:
        return input("Create them? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def run(cloud: Cloud, proof: Proof) -> None:
    """Every step while the ones before passed. Raises Declined."""
    steps = steps_of(cloud)
    for number, paid in enumerate(steps):
        failed, cost = proof.failed, paid.cost(cloud.prices)
        if number == FREE and not failed and not agreed(cloud.given, steps[FREE:], cloud.prices):
            raise Declined
        if not failed:
            print(f"{paid.step.name}: costs {cost}", file=sys.stderr)
        step = _skipped(paid.step, f"the step {failed[0]} failed") if failed else replace(paid.step, cost=cost)
        proof.take(step)


def _skipped(step: Step, reason: str) -> Step:
    def skip(_: float) -> str:
        raise Skipped(reason)

    return replace(step, run=skip, cost="nothing")


def interrupt(*_: object) -> None:
    """Say at once what follows: a command that is under way may take two minutes to end."""
    os.write(
        2, b"\ninterrupted: jobs are cancelled, and what was made is deleted. Ctrl-C again skips what is under way\n"
    )
    raise KeyboardInterrupt


def main() -> int:
    given = arguments()
    folder = (given.folder or ROOT / "build" / "azure" / given.group).resolve()
    (folder / "home").mkdir(parents=True, exist_ok=True)

    def hang_up(*_: object) -> None:
        """The terminal is gone: what is printed from now on goes into a file."""
        log = os.open(folder / "hang-up.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for output in (sys.stdout, sys.stderr):
            os.dup2(log, output.fileno())
        interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    signal.signal(signal.SIGHUP, hang_up)
    try:
        with at_work(folder):
            return prove(given, folder)
    except BlockingIOError as reason:
        print(f"error: {reason}: wait for it, or choose another --folder", file=sys.stderr)
        return 2


def prove(given: argparse.Namespace, folder: Path) -> int:
    """Every step, and the page. Whatever happens, what was made is deleted."""
    cloud, proof, interrupted = Cloud(given, folder), Proof(given.minutes * 60), False
    try:
        run(cloud, proof)
    except Declined:
        print("nobody agreed, so nothing is created; --yes agrees without a question", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        interrupted = True
    finally:
        proof.seconds = float("inf")  # it is deleted whatever the time
        proof.take(Step("delete", "nothing is left that costs money", cloud.delete, 30 * 60.0, "nothing"))
    facts = {"region": given.region, "machines": f"{NODES} x {given.size or 'of your cluster'}"}
    price = cloud.prices.node
    facts |= {"subscription": "not written down"}
    facts |= {"price": "not known" if price is None else f"USD {price:.3f} an hour and machine"}
    page = proof.page("Proof on Azure", "`make azure` wrote this page ([azure.md](../azure.md)).", facts)
    given.to.parent.mkdir(parents=True, exist_ok=True)
    given.to.write_text(page)
    print(page)
    return 130 if interrupted else int(bool(proof.failed))


if __name__ == "__main__":
    sys.exit(main())
