"""A flow that events start, as the shipped ones do: its first act is the claim. It counts starts, who started it, and works."""

from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions

from deployments.catalogue.flows import POOL

FLOW = """
import os, time
from pathlib import Path
from prefect import flow
from prefect.runtime import flow_run
from flows.support.prefect_run import covered_elsewhere
from flows.support.prefect_run import started_by
from tasks.security.audit import actor


def count(folder, what, cause, dataset):
    with open(Path(folder) / what, "a") as file:
        file.write(f"{flow_run.get_id()} {cause} {dataset} {time.time()}\\n")


@flow(name="caused", validate_parameters=False)
def caused(dataset: str = "", cause: str = "", folder: str = "", config: dict | None = None):
    count(folder, "starts", cause, dataset)
    while (Path(folder) / "wait").exists():
        time.sleep(0.05)
    with started_by("run", "a test", cause=cause):
        count(folder, "actors", cause or "-", actor().name)
    if covered_elsewhere(cause):
        return
    count(folder, "works", cause, dataset)
    while (Path(folder) / "hold").exists():
        time.sleep(0.05)
    if (Path(folder) / "fail").exists():
        raise ValueError("as told")
"""


def install(live):
    """Put the module where the worker's flow runs find it."""
    (live.home.parent / "modules" / "caused.py").write_text(FLOW)


def deploy(client, name, folder, *, collision="ENQUEUE"):
    """A deployment of it, caused/NAME, that counts in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return client.create_deployment(
        flow_id=client.create_flow_from_name("caused"),
        name=name,
        entrypoint="caused.caused",
        work_pool_name=POOL,
        parameters={"folder": str(folder), "dataset": "standard"},
        concurrency_limit=1,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy(collision)),
        parameter_openapi_schema={},
        enforce_parameter_schema=False,
        pull_steps=[],
    )
