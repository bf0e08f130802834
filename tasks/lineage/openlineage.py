"""A lineage as OpenLineage's standard events: one START and one COMPLETE for each run of a stage, to a file or to a server.

Made from what the store knows, at any time later; equal lineages give equal events, so a server that is told twice knows it once.
Nothing of MLflow is here. The standard: https://openlineage.io/spec/2-0-2/OpenLineage.json. See docs/lineage.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from openlineage.client import event_v2 as ol
from openlineage.client import facet_v2 as facets
from openlineage.client.serde import Serde

from tasks.common.errors import Missing
from tasks.common.process import write_text

NAMESPACE = "headway"
"""Of the jobs; a dataset's namespace is the address of the store."""
PRODUCER = "urn:headway"
TIMEOUT_SECONDS = 10.0
ENDPOINT = "api/v1/lineage"
UNTIMED = "1970-01-01T00:00:00+00:00"
"""Of a run whose provenance has no time: the standard asks for one."""
TAGS = ("who", "host", "sku", "environment", "config_digest", "dirty")

Node = Mapping[str, Any]
Made = tuple[Node, ...]
"""What one run of a stage made, in the order of time; the last gives the run its name."""


def events_of(
    lineage: Mapping[str, Any], *, store: str, seconds: Mapping[tuple[str, str], float], code: str
) -> list[ol.RunEvent]:
    """Events in the order of time, of each run that made something in a lineage (as tasks/registry/ancestry.py walks it).

    `store` is the address of the store, `seconds` how long a run took, by stage and key, `code` where the code lies.
    """
    nodes = {node["ref"]: node for node in lineage["nodes"]}
    inputs: dict[str, list[str]] = {}
    for edge in lineage["edges"]:
        if edge["how"] in ("input", "context"):
            inputs.setdefault(edge["output"], []).append(edge["input"])
    # By the run that made them; without a key (older, or published by a person) a node stands alone.
    runs: dict[tuple[Any, ...], list[Node]] = {}
    for node in lineage["nodes"]:
        if node["stage"]:
            runs.setdefault((node["stage"], node["key"] or node["ref"], node["flow_run"]), []).append(node)
    events: list[ol.RunEvent] = []
    for group in runs.values():
        made = tuple(sorted(group, key=lambda node: (node["created"] or "", node["ref"])))
        own = {node["ref"] for node in made}
        read = {
            ref: nodes[ref] for each in made for ref in inputs.get(each["ref"], []) if ref in nodes and ref not in own
        }
        took = seconds.get((made[-1]["stage"], made[-1]["key"] or ""), 0.0)
        events += _run_events(made, list(read.values()), store, took, code)
    return sorted(events, key=lambda event: datetime.fromisoformat(event.eventTime))


def hand_on(events: Sequence[ol.RunEvent], target: str, *, key: str = "") -> None:
    """Write events to a file as JSON lines, or send them to a server in order, with `key` as bearer token.

    Raises Missing when the server does not answer or does not take them.
    """
    if target.startswith(("http://", "https://")):
        _send(events, target, key)
    elif "://" in target:
        raise ValueError(f"{target!r} is neither a file nor an address that begins with http:// or https://")
    else:
        write_text(Path(target), "".join(f"{Serde.to_json(event)}\n" for event in events))


def _run_events(made: Made, read: list[Node], store: str, took: float, code: str) -> list[ol.RunEvent]:
    last = made[-1]
    ended = datetime.fromisoformat(max(each["created"] or UNTIMED for each in made))
    began = ended - timedelta(seconds=took)
    # The run's identity is the same each time that it is told.
    apart = (last["key"], last["flow_run"] or "") if last["key"] else (last["ref"], last["created"] or "")
    identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{PRODUCER}\n" + "\n".join((last["stage"], *apart)))
    run = ol.Run(runId=str(identity), facets=_run_facets(last))
    job = ol.Job(namespace=NAMESPACE, name=f"{last['stage']}/{last['name']}", facets=_job_facets(last, code))
    inputs = [ol.InputDataset(store, _name(node), facets=_dataset_facets(node, store)) for node in read]
    outputs = [
        ol.OutputDataset(store, _name(node), facets=_dataset_facets(node, store), outputFacets=_size(node))
        for node in made
    ]
    return [
        ol.RunEvent(
            eventType=state,
            eventTime=time.isoformat(),
            run=run,
            job=job,
            inputs=inputs,
            outputs=made_then,
            producer=PRODUCER,
        )
        for state, time, made_then in (
            (ol.RunState.START, began, []),
            (ol.RunState.COMPLETE, ended, outputs),
        )
    ]


def _run_facets(node: Node) -> dict[str, Any]:
    tags = [
        facets.tags_run.TagsRunFacetFields(
            key=key, value=str(node[key]).lower() if key == "dirty" else node[key], source="HEADWAY"
        )
        for key in TAGS
        if node[key] is not None
    ]
    result: dict[str, Any] = {"tags": facets.tags_run.TagsRunFacet(tags=tags, producer=PRODUCER)}
    if node["flow_run"]:
        flow = facets.parent_run.Job(namespace=NAMESPACE, name=node["flow"] or "flow")
        try:
            identity = uuid.UUID(node["flow_run"])
        except ValueError:  # a run without Prefect: its identity is made of its name
            identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{PRODUCER}\n{node['flow_run']}")
        run = facets.parent_run.Run(runId=str(identity))
        result["parent"] = facets.parent_run.ParentRunFacet(run=run, job=flow, producer=PRODUCER)
    return result


def _job_facets(node: Node, code: str) -> dict[str, Any]:
    kind = facets.job_type_job.JobTypeJobFacet(
        processingType="BATCH", integration="HEADWAY", jobType="STAGE", producer=PRODUCER
    )
    text = (
        f"The stage {node['stage']} of Headway's flow {node['flow'] or '(unknown)'}: docs/stages.md says what it does."
    )
    result: dict[str, Any] = {
        "jobType": kind,
        "documentation": facets.documentation_job.DocumentationJobFacet(description=text, producer=PRODUCER),
    }
    if node["commit"]:
        result["sourceCodeLocation"] = facets.source_code_location_job.SourceCodeLocationJobFacet(
            type="git", url=code, repoUrl=code, version=node["commit"], producer=PRODUCER
        )
    return result


def _dataset_facets(node: Node, store: str) -> dict[str, Any]:
    made = f", made by the stage {node['stage']}" if node["stage"] else ""
    result: dict[str, Any] = {
        "version": facets.dataset_version_dataset.DatasetVersionDatasetFacet(
            datasetVersion=node["version"], producer=PRODUCER
        ),
        "documentation": facets.documentation_dataset.DocumentationDatasetFacet(
            description=f"{node['kind']} {node['name']}{made}; `headway lineage {node['ref']}` tells more",
            producer=PRODUCER,
        ),
        "dataSource": facets.datasource_dataset.DatasourceDatasetFacet(
            name=store, uri=node["uri"] or store, producer=PRODUCER
        ),
    }
    return result


def _size(node: Node) -> dict[str, Any]:
    if node["bytes"] is None:
        return {}
    facet = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        size=node["bytes"], fileCount=node["files"], producer=PRODUCER
    )
    return {"outputStatistics": facet}


def _name(node: Node) -> str:
    return f"{node['kind']}/{node['name']}"


def _send(events: Sequence[ol.RunEvent], url: str, key: str) -> None:
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider
    from openlineage.client.transport.http_common import DEFAULT_RETRY_CONFIG
    from requests import HTTPError, RequestException

    parts = urlsplit(url)
    transport = HttpTransport(
        HttpConfig(
            url=urlunsplit((parts.scheme, parts.netloc, "", "", "")),
            endpoint=parts.path.strip("/") or ENDPOINT,
            timeout=TIMEOUT_SECONDS,
            auth=ApiKeyTokenProvider({"apiKey": key}) if key else TokenProvider({}),
            retry={**DEFAULT_RETRY_CONFIG, "total": 1, "connect": 0, "read": 0},
        )
    )
    sent = 0
    try:
        for event in events:
            transport.emit(event)
            sent += 1
    except HTTPError as error:
        raise _refused(
            url, f"answered {getattr(error.response, 'status_code', 'nothing')}", sent, len(events)
        ) from error
    except RequestException as error:
        raise _refused(
            url,
            f"does not answer ({type(error).__name__}, after at most {TIMEOUT_SECONDS:.0f} s)",
            sent,
            len(events),
        ) from error
    finally:
        transport.close()


def _refused(url: str, what: str, payload: int, count: int) -> Missing:
    return Missing(
        f"the OpenLineage server at {url} {what}; it took {payload} of {count} events",
        remedy="Check whether it runs, whether the address is right, and whether OPENLINEAGE_API_KEY is the key that it expects. "
        "The same command sends every event again; those that it already has count once.",
    )
