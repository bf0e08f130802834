"""A flow that asks a person, as a program: tests/integration/flows/test_approval.py starts it, answers, kills it and resumes it.

Its arguments are one JSON object: subject, `terms`, expire_minutes, remind_minutes, `exercises`, `person` who starts it, whether
to `use` the approval up, kinds of `earlier` questions about the same, and `resume`, the id of a flow run that is taken up again
as the platform does it. It prints what came of it as one JSON object.
"""

import json
import sys
from contextlib import nullcontext

from deployments.services import prefect_server
from tasks.common.home import home
from tasks.config.flows import ApprovalConfig

ARGUMENTS = json.loads(sys.argv[1])
prefect_server.wait(prefect_server.prepare(home()))

from prefect import flow  # noqa: E402
from prefect.client.orchestration import get_client  # noqa: E402
from prefect.flow_engine import run_flow  # noqa: E402
from prefect.states import Pending  # noqa: E402

from flows.support.approval import approve, using  # noqa: E402
from flows.support.prefect_run import cancelled, flow_run  # noqa: E402
from tasks.orchestration.run import lifecycle  # noqa: E402
from tasks.security.audit import acting  # noqa: E402


@flow(name="asking", persist_result=False)
def asking(subject: str, config: ApprovalConfig) -> dict:
    with lifecycle(
        "asking",
        config,
        subject=subject.split("/")[1].partition("@")[0],
        stages=(),
        cancelled=cancelled,
        flow_run=flow_run(),
    ):
        about = {
            "subject": subject,
            "terms": ARGUMENTS.get("terms"),
            "exercises": ARGUMENTS.get("exercises", "approve"),
        }
        for kind in ARGUMENTS.get("earlier", ()):
            approve("Begin?", "Because of **that**.", config, kind=kind, subject=subject)
        given = approve("Go on?", "Because of **this**.", config, kind="test", **about)
        with using(given) if ARGUMENTS.get("use") else nullcontext():
            return given.model_dump()


def run() -> dict:
    config = ApprovalConfig(**{key: ARGUMENTS[key] for key in ("expire_minutes", "remind_minutes")})
    parameters = {"subject": ARGUMENTS["subject"], "config": config.model_dump()}
    if not ARGUMENTS.get("resume"):
        return asking(**parameters)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(ARGUMENTS["resume"], Pending(), force=True)
        known = client.read_flow_run(ARGUMENTS["resume"])
    return run_flow(asking, flow_run=known, parameters=parameters)


if __name__ == "__main__":
    try:
        with acting(ARGUMENTS["person"]) if ARGUMENTS.get("person") else nullcontext():
            print(json.dumps({"approval": run()}))
    except Exception as error:  # noqa: BLE001 - a program's main
        print(json.dumps({"error": type(error).__name__, "message": str(error), "stage": getattr(error, "stage", "")}))
