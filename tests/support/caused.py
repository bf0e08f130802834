# fork: commands
"""A flow run that events asked for, as a program, and the batches of events that tests make for it.

Its arguments are one JSON object: flow, dataset, cause, set, `person` who starts it, and `key`, the idempotency key under which
`headway run` made the flow run. It prints the final state of the flow run as one JSON object.
"""

import json
import sys
import time
import uuid
from contextlib import nullcontext


def make_batch(home, name, subject, *, object_="", dataset="", deployment="retrain/tiny"):
    """An event that was taken in, and the batch that covers it; returns the batch's id."""
    from tasks.events.batches import make_batch as make
    from tasks.events.batches import route
    from tasks.events.event import Event
    from tasks.events.ledger import Ledger

    ledger, identity = Ledger(home), uuid.uuid4().hex
    event = Event(
        name=name,
        subject=subject,
        source="test",
        identity=identity,
        object=object_,
        occurred=time.time(),
        channel="hand",
        data={"dataset": dataset},
    )
    assert ledger.receive(event).status == "accepted"
    route(ledger, lambda wanted, about: [identity] if (wanted, about) == (name, subject) else [], [identity])
    made = make(
        ledger,
        identity,
        subject,
        deployment=deployment,
        dataset=lambda row: dataset,
        cooldown=0.0,
        now=time.time(),
    )
    assert made is not None
    return made.id


def main(arguments):
    from deployments.services import prefect_server
    from tasks.common.home import home

    prefect_server.wait(prefect_server.prepare(home()))
    import importlib

    from deployments.catalogue.flows import parameters
    from tasks.security.audit import acting

    flow = getattr(importlib.import_module(f"flows.{arguments['flow']}"), arguments["flow"])
    told = parameters(arguments["flow"], "tiny", arguments["dataset"], tuple(arguments["set"]))
    with acting(arguments["person"]) if arguments.get("person") else nullcontext():
        if key := arguments.get("key"):
            state = handed_over(flow, {**told, "cause": arguments["cause"]}, key)
        else:
            state = flow(**told, cause=arguments["cause"], return_state=True)
    return {"type": state.type.value, "message": state.message}


def handed_over(flow, parameters, key):
    """Run a flow as the platform does whose run was made under a key."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    with get_client(sync_client=True) as client:
        made = {"flow_id": str(client.create_flow(flow)), "idempotency_key": key, "state": {"type": "PENDING"}}
        run = client.read_flow_run(client.request("POST", "/flow_runs/", json=made).json()["id"])
    return run_flow(flow, flow_run=run, parameters=parameters, return_type="state")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
