"""What is seen of a model on Azure ML: our own requests to one deployment, and Azure Monitor's counts where it has any.

Our requests are golden prompts, sent past the split by the header `azureml-model-deployment`: they time both models and hold
every answer to the golden one, so they can send the traffic back, and are no evidence for a step. Azure Monitor counts what
callers got, a few minutes late; while it is silent nothing is known of them.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.azure.arm_client import workspace_id
from tasks.common.errors import HeadwayError, JobFailed, Missing
from tasks.common.process import read_json
from tasks.serving.azureml.client import Online
from tasks.serving.client import Sampling
from tasks.serving.protocol.judge import FEWEST_OLD, LATE, Seen
from tasks.serving.vllm import has_logprobs

HEADER = "azureml-model-deployment"
METRICS_VERSION = "2018-01-01"
REQUEST_SECONDS = 60.0
MONITOR_SECONDS = 30.0
"""Between two questions to Azure Monitor, which counts by the minute."""
log = logging.getLogger("headway.azureml")


@dataclass(frozen=True)
class Answer:
    """Of one golden prompt."""

    text: str
    model_ref: str
    seconds: float


class Unanswered(Exception):
    """A deployment failed to answer by its own fault: 5xx, a broken connection, no answer in time."""


def score(
    url: str, prompt: str, how: Sampling, *, secret: str, deployment: str = "", seconds: float = REQUEST_SECONDS
) -> Answer:
    """Ask one deployment, or whichever the split chooses, to go on with a text, within so many seconds.

    Raises Unanswered, and ValueError for what is the caller's own fault.
    """
    body = {"input_data": {"input_string": [prompt], "parameters": _parameters(how)}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
    headers |= {HEADER: deployment} if deployment else {}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began = time.monotonic()
    try:
        is_local = urlsplit(url).hostname in ("127.0.0.1", "localhost")
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_local else []))
        with opener.open(request, timeout=seconds) as reply:
            output = json.load(reply)
            model_ref = str(reply.headers.get("X-Headway-Model", ""))
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500 and error.code not in (424, 429):  # 424: Azure ML's word for a model's own 5xx
                text = error.read(2000).decode(errors="replace").strip() or error.reason
                raise ValueError(f"{url} refused {prompt[:40]!r} with {error.code}: {text}") from error
            raise Unanswered(f"{deployment or url} answered {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unanswered(f"{deployment or url} did not answer: {error}") from error
    return Answer(str(output[0]["0"]), model_ref, time.monotonic() - began)


def complete_there(endpoint: Path, prompt: str, how: Sampling) -> dict[str, Any]:
    """A person's request to an endpoint, by its split: completion, model, usage. Raises Missing when it does not answer."""
    from tasks.serving.azureml.rollout import online_of

    record = read_json(endpoint / "endpoint.json")
    secret = online_of(record).secret(record["azure_name"], auth=record["azureml"]["auth"])
    try:
        got = score(record["url"], prompt, how, secret=secret)
    except Unanswered as error:
        raise Missing(
            f"endpoint/{endpoint.name} does not answer: {error}", remedy="Look at it in the studio."
        ) from error
    return {"completion": got.text, "model": got.model_ref, "usage": {}}


def difference(entry: Mapping[str, Any], got: Answer, model_ref: str) -> str:
    """How an answer is not the golden one; empty when it is.

    vLLM's may be another text and right; its server has proven the model by log probabilities before it was ready.
    """
    if has_logprobs([entry]) and got.model_ref == model_ref:
        return ""
    if (got.text, got.model_ref) == (entry["completion"], model_ref):
        return ""
    return (
        f"answered the golden prompt {entry['prompt']!r} with {got.text!r} (model {got.model_ref}); "
        f"expected {entry['completion']!r} (model {model_ref})"
    )


def ask_golden(
    url: str, prompts: Sequence[Mapping[str, Any]], *, secret: str, deployment: str, model_ref: str, folder: str
) -> None:
    """Ask a deployment every golden prompt; JobFailed names the first that it answers otherwise, or not."""
    for entry in prompts:
        try:
            wrong = difference(entry, _golden(url, entry, secret=secret, deployment=deployment), model_ref)
        except Unanswered as error:
            wrong = str(error)
        if wrong:
            raise JobFailed(
                f"the deployment {deployment} for {model_ref} {wrong}",
                failure="infrastructure",
                folder=folder,
                remedy="The endpoint serves what it served before. `az ml online-deployment get-logs` has its log.",
            )


@dataclass
class Probed:
    """What our own requests saw of one deployment."""

    requests: int = 0
    failures: int = 0
    seconds_per_token: list[float] = field(default_factory=list)
    longest: float = 0.0
    """Seconds of the slowest answer."""
    wrong: str = ""

    def take(
        self, url: str, entry: Mapping[str, Any], *, secret: str, deployment: str, model_ref: str, seconds: float
    ) -> None:
        """Ask once more; no answer within so many seconds is a failure."""
        self.requests += 1
        try:
            got = _golden(url, entry, secret=secret, deployment=deployment, seconds=seconds)
        except Unanswered as error:
            self.failures += 1
            log.warning("%s", error)
            return
        self.longest = max(self.longest, got.seconds)
        self.seconds_per_token.append(got.seconds / max(1, len(entry["tokens"])))
        self.wrong = self.wrong or difference(entry, got, model_ref)

    def late_after(self) -> float:
        """Seconds after which a request to the other model is late, by the answers of this one."""
        known = len(self.seconds_per_token) >= FEWEST_OLD
        return min(LATE * self.longest, REQUEST_SECONDS) if known else REQUEST_SECONDS


def together(probed: Probed, counted: Mapping[str, int] | None) -> Seen:
    """What the judge sees: callers' requests as Azure Monitor counted them, none while it is silent; times are ours."""
    counts = counted or {"requests": 0, "failures": 0}
    return Seen(
        requests=counts["requests"],
        failures=counts["failures"],
        seconds_per_token=tuple(probed.seconds_per_token),
        probes=probed.requests,
        probe_failures=probed.failures,
        trip=probed.wrong,
    )


class Monitor:
    """Azure Monitor's counts of an endpoint. State: the last answer, and whether it was said that there is none."""

    def __init__(self, online: Online, name: str) -> None:
        self._online, self._name = online, name
        self._asked, self._since, self._last = 0.0, 0.0, {}  # type: float, float, dict[str, dict[str, int]]
        self._silent = False

    def counts(self, since: float) -> dict[str, dict[str, int]]:
        """Requests and failures by deployment, of the whole minutes since a time; empty when there are none yet."""
        if since == self._since and time.monotonic() - self._asked < MONITOR_SECONDS:
            return self._last
        self._asked, self._since, self._last = time.monotonic(), since, {}
        try:
            self._last = counted(self._online.get(metrics_path(self._online, self._name), metrics_query(since)))
        except (HeadwayError, ValueError) as error:
            if not self._silent:
                log.warning("Azure Monitor has no counts of %s, so steps are not judged: %s", self._name, error)
            self._silent = True
        return self._last


def metrics_path(online: Online, name: str) -> str:
    """Of the endpoint's metrics in Azure Resource Manager."""
    return f"{workspace_id(online.where)}/onlineEndpoints/{name}/providers/Microsoft.Insights/metrics"


def metrics_query(since: float, now: float | None = None) -> dict[str, str]:
    """Whole minutes only: the one in which a step began has requests of the step before."""
    began, until = -int(-since // 60) * 60, max(time.time() if now is None else now, since + 60)
    span = "/".join(datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for at in (began, until))
    return {
        "api-version": METRICS_VERSION,
        "metricnames": "RequestsPerMinute",
        "aggregation": "Average",
        "interval": "PT1M",
        "timespan": span,
        "$filter": "deployment eq '*' and statusCodeClass eq '*'",
    }


def counted(output: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Requests and failures by deployment, of an answer of Azure Monitor. The callers' mistakes (4xx) are not counted."""
    result: dict[str, dict[str, int]] = {}
    for metric in output.get("value", ()):
        for series in metric.get("timeseries", ()):
            names = {one["name"]["value"].lower(): one["value"] for one in series.get("metadatavalues", ())}
            number = round(sum(float(point.get("average") or 0) for point in series.get("data", ())))
            if not number or names.get("statuscodeclass", "").lower() == "4xx":
                continue
            one = result.setdefault(names.get("deployment", ""), {"requests": 0, "failures": 0})
            one["requests"] += number
            one["failures"] += number if names.get("statuscodeclass", "").lower() == "5xx" else 0
    return result


def _golden(
    url: str, entry: Mapping[str, Any], *, secret: str, deployment: str, seconds: float = REQUEST_SECONDS
) -> Answer:
    how = Sampling(len(entry["tokens"]))
    return score(url, entry["prompt"], how, secret=secret, deployment=deployment, seconds=seconds)


def _parameters(how: Sampling) -> dict[str, Any]:
    """In Azure ML's words. `seed` and `stop` are ours, and sent where they say something."""
    output: dict[str, Any] = {"max_new_tokens": how.max_tokens, "do_sample": how.temperature > 0}
    output |= {"temperature": how.temperature, "top_p": how.top_p} if how.temperature > 0 else {}
    output |= {"seed": how.seed} if how.seed is not None else {}
    return output | ({"stop": list(how.stop)} if how.stop else {})
