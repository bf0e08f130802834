"""The traffic of a managed online endpoint, for tasks/serving/rollout.py: shares of deployments, and the record of what is in
service.

All that it needs stands in the first line of the change in the journal, so the next deployer can go on where one died. Azure ML's
own split replays nothing: a request that green fails is failed to its caller. See docs/azureml-endpoints.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import open_files
from tasks.common.process import read_json, write_json
from tasks.config.serving import AzureEndpointConfig
from tasks.serving.azureml.client import Online
from tasks.serving.azureml.probes import REQUEST_SECONDS, Monitor, Probed, together
from tasks.serving.azureml.render import scales, scaling_name
from tasks.serving.protocol.judge import Seen
from tasks.serving.rollout import Role
from tasks.serving.servers import ask_back

Record = dict[str, Any]
"""endpoint.json: name, url, port, model_ref, folder, colour, since, azure_name, azureml, and `previous`, a record without one."""


WRITABLE = ("authMode", "compute", "description", "mirrorTraffic", "properties", "publicNetworkAccess", "traffic")
"""Of an endpoint's properties, the ones that a PUT may have; `keys` may only be set once."""


class AzureTraffic:
    """A TrafficPort. State: what our requests saw of blue since the rollout began, and of green since the traffic was set."""

    def __init__(self, endpoint: Path, begun: Mapping[str, Any], online: Online | None = None) -> None:
        """`begun` is the first line of the change: `blue` and `green`, records, blue may be None, and `config`."""
        self._endpoint = endpoint
        self.blue: Record | None = begun["blue"]
        self.green: Record = begun["green"]
        self._warm = float(begun["config"]["keep_warm_seconds"])
        self._auth = AzureEndpointConfig(**self.green["azureml"]).auth
        self._online = online or online_of(self.green)
        self._monitor = Monitor(self._online, self._name)
        self._prompts: dict[str, Any] = {}
        self._secret = ""
        self._probed: dict[Role, Probed] = {"blue": Probed(), "green": Probed()}
        self._start_over()

    def set_traffic(self, weights: Mapping[Role, int], *, mirror: int = 0) -> None:
        """See TrafficPort. One PUT: the service takes the old shares or the new ones, nothing between."""
        roles: dict[Role, Record | None] = {"blue": self.blue, "green": self.green}
        existing = {role: one for role, one in roles.items() if one and self._there(one)}
        shares = {str(one["colour"]): weights[role] for role, one in existing.items()}
        if len(existing) == 1 and any(weights[role] for role in existing):
            shares = dict.fromkeys(shares, 100)
        mirrored = {str(self.green["colour"]): mirror} if mirror and len(existing) > 1 else {}
        self._put({colour: share for colour, share in shares.items() if share}, mirrored)
        self._start_over()

    def observe(self) -> Mapping[Role, Seen]:
        """See TrafficPort. Asks each model one golden prompt more; callers' requests are counted by Azure Monitor."""
        counts = self._monitor.counts(self._since)
        blue = together(self._probe(self.blue, "blue"), counts.get(self.blue["colour"])) if self.blue else Seen()
        seconds = self._probed["blue"].late_after()
        green = together(self._probe(self.green, "green", seconds), counts.get(self.green["colour"]))
        return {"blue": blue, "green": green}

    def has_both(self) -> bool:
        """Whether there is a model in service to compare with; an administrator, or `stop`, may have deleted it."""
        return bool(self.blue and self._there(self.blue))

    def asked_back(self) -> str:
        """See TrafficPort."""
        return ask_back(self._endpoint)

    def promote(self) -> None:
        """See TrafficPort. The record first: from then on it is green that is in service."""
        path = self._endpoint / "endpoint.json"
        if (read_json(path) or {}).get("folder") != self.green["folder"]:
            before = {key: value for key, value in (self.blue or {}).items() if key != "previous"}
            until = {"previous": {**before, "until": time.time() + self._warm}} if before else {}
            green = {key: value for key, value in self.green.items() if key not in ("previous", "until")}
            write_json(path, {**green, "since": time.time(), **until}, seal=True)
        if self.blue and not self._warm:
            delete_deployment(self._online, self.blue)
        self._forget_asked()

    def withdraw(self) -> None:
        """See TrafficPort. Of an endpoint that had no model before, the endpoint itself stays: it costs nothing."""
        delete_deployment(self._online, self.green)
        self._forget_asked()

    @property
    def _name(self) -> str:
        return str(self.green["azure_name"])

    def _there(self, record: Record) -> bool:
        return self._online.deployment(self._name, record["colour"]) is not None

    def _put(self, traffic: dict[str, int], mirror: dict[str, int]) -> None:
        result = self._online.settled(lambda: self._online.endpoint(self._name))
        if result is None:
            return
        now = result["properties"]
        if (now.get("traffic") or {}, now.get("mirrorTraffic") or {}) == (traffic, mirror):
            return
        body = writable(result)
        body["properties"] |= {"traffic": traffic, "mirrorTraffic": mirror}
        self._online.put_endpoint(self._name, body)

    def _probe(self, record: Record, role: Role, seconds: float = REQUEST_SECONDS) -> Probed:
        seen, prompts = self._probed[role], self._of(record)
        if prompts is not None:
            self._secret = self._secret or self._online.secret(self._name, auth=self._auth)
            seen.take(
                record["url"],
                next(prompts),
                secret=self._secret,
                deployment=record["colour"],
                model_ref=record["model_ref"],
                seconds=seconds,
            )
        return seen

    def _of(self, record: Record) -> Any:
        """The golden prompts of a model, again and again; None where its files are not on this machine any more."""
        if record["folder"] not in self._prompts:
            started = read_json(Path(record["folder"]) / "serve.json") or {}
            golden = read_json(Path(str(started.get("model_folder", record["folder"]))) / "golden.json")
            self._prompts[record["folder"]] = cycle(golden["prompts"]) if golden else None
        return self._prompts[record["folder"]]

    def _start_over(self) -> None:
        self._since = time.time()
        self._probed["green"] = Probed()

    def _forget_asked(self) -> None:
        (self._endpoint / "abort.json").unlink(missing_ok=True)


def online_of(record: Mapping[str, Any]) -> Online:
    """The workspace that a record tells of, asked as whoever the store's credential is."""
    config = AzureEndpointConfig(**record["azureml"])
    return Online(
        config,
        lambda: open_files(config.store).token(),
        seconds=config.create_minutes * 60,
        poll=config.poll_seconds,
    )


def delete_deployment(online: Online, record: Record) -> None:
    """Delete a record's deployment, and before it what scales it: a setting of Azure Monitor outlives what it is of."""
    if scales(AzureEndpointConfig(**record["azureml"])):
        online.delete_scaling(scaling_name(record["azure_name"], record["colour"]))
    online.delete_deployment(record["azure_name"], record["colour"])


def delete_endpoint(online: Online, record: Record) -> None:
    """Delete a record's endpoint with all its deployments, and what scales these. One that serves nothing has no colour."""
    for one in (record, record.get("previous")):
        if one and "colour" in one and scales(AzureEndpointConfig(**one["azureml"])):
            online.delete_scaling(scaling_name(one["azure_name"], one["colour"]))
    online.delete_endpoint(record["azure_name"])


def writable(result: Mapping[str, Any]) -> dict[str, Any]:
    """An endpoint as it is, as the body of a PUT: without what only the service writes."""
    body: Record = {key: result[key] for key in ("kind", "location", "sku", "tags") if result.get(key)}
    body["properties"] = {key: value for key, value in result["properties"].items() if key in WRITABLE and value}
    if identity := result.get("identity"):
        body["identity"] = {"type": identity["type"]}
        if users := identity.get("userAssignedIdentities"):
            body["identity"]["userAssignedIdentities"] = {name: {} for name in users}
    return body
