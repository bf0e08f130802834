"""Channels of the settings, against a real Prefect server, a real web hook and a real mail server: what happens is told, once."""

import json
import os
import threading
import time
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiosmtpd.controller import Controller
from waiting import limit

from deployments.configuration.platform import NotificationConfig, PlatformConfig
from deployments.platform.notifications import address_of, send
from deployments.services import prefect_server
from deployments.services.starting import free_port
from deployments.watch.alerts import event_of

WAIT_SECONDS = 30.0


class Hook:
    """A web hook that keeps what it is sent."""

    def __init__(self):
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                hook.got.append((body["title"], body["message"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                return None

        self.got = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"json://127.0.0.1:{self.server.server_port}/hook"


class Mailbox:
    """A mail server that keeps what it is sent."""

    def __init__(self):
        self.got = []
        self.controller = Controller(self, hostname="127.0.0.1", port=free_port(), ready_timeout=limit(30))
        self.controller.start()

    async def handle_DATA(self, server, session, envelope):  # noqa: N802
        mail = message_from_bytes(envelope.content)
        part = next(part for part in mail.walk() if part.get_content_type() == "text/plain")
        text = part.get_payload(decode=True).decode().replace("\r\n", "\n")
        self.got.append((str(mail["Subject"]).replace("\n", ""), text))
        return "250 OK"

    @property
    def address(self):
        return (
            f"mailto://127.0.0.1:{self.controller.port}/?mode=insecure&from=headway@example.org&to=oncall@example.org"
        )


@pytest.fixture(scope="module")
def sinks():
    hook, mailbox = Hook(), Mailbox()
    yield {"hook": hook, "mail": mailbox}
    hook.server.shutdown()
    mailbox.controller.stop()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a Prefect server of its own."""
    home, before = tmp_path_factory.mktemp("notified") / "home", dict(os.environ)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    server = prefect_server.prepare(home)
    try:
        prefect_server.wait(server)
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

        there = {PREFECT_API_URL: f"{server['url']}/api", PREFECT_API_AUTH_STRING: prefect_server.password(home)}
        with temporary_settings(there), get_client(sync_client=True) as made:
            yield made
    finally:
        prefect_server.down(home)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def told(client, sinks):
    """All occasions go to both sinks."""
    from deployments.platform.notifications import apply

    apply(client, config_of(sinks))
    for sink in sinks.values():
        sink.got.clear()
    return sinks


def config_of(sinks, **changes):
    channels = [NotificationConfig(name=name, url=sink.address, **changes) for name, sink in sinks.items()]
    return PlatformConfig(notifications=tuple(channels))


def ours(client):
    from deployments.platform.notifications import BLOCKS, _documents

    documents = [found.name for kind in BLOCKS for found in _documents(client, kind)]
    names = [found.name for found in client.read_automations() if found.name.startswith("headway-")]
    return sorted(names), sorted(documents)


def wait_for(sinks, count, within=WAIT_SECONDS):
    """What every sink got, once each has the number of messages, and a little later no more than that."""
    deadline = time.monotonic() + limit(within)
    while any(len(sink.got) < count for sink in sinks.values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2.0)
    found = [sorted(sink.got) for sink in sinks.values()]
    assert [len(got) for got in found] == [count] * len(found), found
    return found


def end_flow_run(client, state, flow="retrain"):
    """A flow run that came to its end in this state."""
    from prefect import flow as made

    body = made(name=flow)(lambda: None)
    run = client.create_flow_run(body, name=f"{flow}-of-a-test")
    client.set_flow_run_state(run.id, state, force=True)
    return run.id


def emit(client, event, resource, payload, **labels):
    from prefect.events import Event

    said = Event(event=event, resource={"prefect.resource.id": resource, **labels}, payload=payload)
    client.request("POST", "/events", json=[said.model_dump(mode="json")]).raise_for_status()


def alarm(client, alert, states=("fired", "cleared"), **payload):
    """An alert as deployments/watch/alerts.py tells it."""
    told = {
        "alert": alert,
        "instance": "x",
        "severity": "warning",
        "summary": alert,
        "labels": {},
        "url": "",
        **payload,
    }
    for state in states:
        said = event_of({"details": "", "remedy": "", "since": 1.0, **told}, state, time.time())
        client.request("POST", "/events", json=[said]).raise_for_status()


def test_each_run_that_ends_badly_is_told_with_its_message_and_its_page(client, told):
    """A closed gate as one and not as a failure; what ends well or is not ours is not told."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    why = "the gate of plan stays closed: memory per rank, GiB: measured 3, limit <= 1"
    end_flow_run(client, Completed())
    end_flow_run(client, Cancelled())
    end_flow_run(client, Failed(message="boom"), flow="somebody-elses")
    run = end_flow_run(client, Failed(message="Flow run encountered an exception: JobFailed: rank 1 of train died"))
    end_flow_run(client, Crashed())
    end_flow_run(client, Failed(message=f"Flow run encountered an exception: GateFailed: {why}"))
    for got in wait_for(told, 3):
        (gate, closed), (crash, crashed), (failure, failed) = got
        assert gate == "Headway: a gate stayed closed in retrain-of-a-test"
        assert why in closed and "GateFailed" not in closed
        assert crash == "Headway: retrain-of-a-test crashed"
        assert "No reason was given" in crashed and "None" not in crashed
        assert failure == "Headway: retrain-of-a-test failed"
        assert "JobFailed: rank 1 of train died" in failed and "encountered an exception" not in failed
        assert f"/runs/flow-run/{run}" in failed and "Retry" in failed


def test_alerts_are_told_when_they_begin_and_are_over_and_approvals_are_asked_for(client, told):
    """What an occasion tells is not told again as an alert; its end is: nothing else tells that.

    A payload that lacks fields is told all the same: a template that gives nothing must not make Prefect drop the message.
    """
    words = {
        "summary": "4.2 GB free",
        "details": "/home, of 100 GB",
        "remedy": "Free room.",
        "url": "http://127.0.0.1:1/",
    }
    alarm(client, "disk_nearly_full", **words)
    for alert in ("run_failed", "flow_run_died", "gate_closed"):
        alarm(client, alert)
    asked = {"question": "Promote model/tiny@123?", "url": "http://127.0.0.1:1/runs/flow-run/1", "minutes_left": 59.6}
    emit(client, "headway.approval.needed", "headway.approval.1", asked)
    bare = {"headway.alert": "disk_nearly_full"}
    emit(client, "headway.alert.fired", "headway.alert.bare", {"summary": "bare", "remedy": None}, **bare)
    emit(client, "headway.approval.needed", "headway.approval.2", {"question": "bare?", "minutes_left": None})
    for got in wait_for(told, 8):
        bodies = dict(got)
        assert bodies.keys() == {
            "Headway asks: Promote model/tiny@123?",
            "Headway asks: bare?",
            "Headway: 4.2 GB free",
            "Headway: bare",
            *(f"Headway: over: {alert}" for alert in ("4.2 GB free", "flow_run_died", "gate_closed", "run_failed")),
        }
        body, end = bodies["Headway: 4.2 GB free"], bodies["Headway: over: 4.2 GB free"]
        assert "/home, of 100 GB" in body and "What to do: Free room." in body and "Alert: disk_nearly_full" in body
        assert words["url"] in body and end.startswith("Over: 4.2 GB free") and "What to do" not in end
        question = bodies["Headway asks: Promote model/tiny@123?"]
        assert asked["url"] in question and "60 more minutes" in question
        assert not any("None" in bodies[subject] for subject in ("Headway asks: bare?", "Headway: bare"))
        assert "Alert: headway.alert.bare" in bodies["Headway: bare"]


def test_who_is_told_of_alerts_only_is_told_of_failed_runs_by_them(client, told):
    from deployments.platform.notifications import apply

    apply(client, config_of(told, occasions=("alert", "gate_closed")))
    for alert in ("run_failed", "flow_run_died", "gate_closed"):
        alarm(client, alert, states=("fired",))
    for got in wait_for(told, 2):
        assert [subject for subject, _ in got] == ["Headway: flow_run_died", "Headway: run_failed"]


def test_the_settings_are_what_is_in_force(client, sinks):
    """Twice the same changes nothing; an occasion and a channel that leave the settings leave the server; others' stay."""
    from prefect.events.actions import DoNothing
    from prefect.events.schemas.automations import AutomationCore, EventTrigger

    from deployments.platform.notifications import apply

    theirs = AutomationCore(name="theirs", trigger=EventTrigger(expect={"x"}), actions=[DoNothing()])
    kept = client.create_automation(theirs)
    notices = ("alert", "alert-over", "approval-needed", "failed", "gate-closed")
    both = sorted(f"headway-{name}-{notice}" for name in sinks for notice in notices)
    assert apply(client, config_of(sinks)) == both
    before = {found.name: found for found in client.read_automations()}
    assert apply(client, config_of(sinks)) == both
    assert {found.name: found for found in client.read_automations()} == before
    assert ours(client) == (both, ["headway-hook", "headway-mail"])
    only = {"hook": sinks["hook"]}
    assert apply(client, config_of(only, occasions=("failed",))) == ["headway-hook-failed"]
    assert ours(client) == (["headway-hook-failed"], ["headway-hook"])
    apply(client, PlatformConfig())
    assert ours(client) == ([], [])
    assert client.read_automation(kept) is not None
    client.delete_automation(kept)


def test_a_channel_that_moves_keeps_one_block(client, sinks, monkeypatch):
    """From a web hook to a Teams workflow, whose block is another kind; its address comes from the environment."""
    from deployments.platform.notifications import apply

    teams = "https://prod-1.westeurope.logic.azure.com:443/workflows/643e69f83c8944/triggers/manual/paths/invoke"
    monkeypatch.setenv("ONCALL", f"{teams}?api-version=2016-06-01&sp=%2Ftriggers&sv=1.0&sig=KODuebWb")
    apply(client, config_of({"hook": sinks["hook"]}))
    apply(
        client,
        PlatformConfig(notifications=(NotificationConfig(name="hook", url="env:ONCALL", occasions=("failed",)),)),
    )
    assert ours(client) == (["headway-hook-failed"], ["headway-hook"])
    (document,) = client.read_block_documents_by_type("ms-teams-webhook", include_secrets=False)
    assert "KODuebWb" not in document.model_dump_json()
    apply(client, PlatformConfig())


def test_a_wrong_address_is_refused_before_anything_is_changed(client, told, monkeypatch):
    from deployments.platform.notifications import apply

    monkeypatch.delenv("NOT_SET", raising=False)
    before = ours(client)
    good = NotificationConfig(name="good", url=told["hook"].address)
    for url, said in [("nothing://secret-word", "nothing can be sent to"), ("env:NOT_SET", "NOT_SET")]:
        with pytest.raises(ValueError, match=said) as refused:
            apply(client, PlatformConfig(notifications=(good, NotificationConfig(name="bad", url=url))))
        assert "'bad'" in str(refused.value) and "secret-word" not in str(refused.value)
    with pytest.raises(ValueError, match="two channels named 'good'"):
        apply(client, PlatformConfig(notifications=(good, good)))
    assert ours(client) == before


def test_a_sink_that_is_down_is_an_event_of_failure_and_the_others_are_told(client, told):
    """Prefect tries once. It says so by an event and a line of its log; what is down gets nothing later."""
    from deployments.platform.notifications import apply

    gone = NotificationConfig(name="gone", url=f"json://127.0.0.1:{free_port()}/", occasions=("alert",))
    apply(client, PlatformConfig(notifications=(*config_of(told).notifications, gone)))
    alarm(client, "disk_nearly_full", states=("fired",))
    wait_for(told, 1)
    failed = {"event": {"name": ["prefect.automation.action.failed"]}, "order": "DESC"}
    deadline = time.monotonic() + limit(WAIT_SECONDS)
    while True:
        found = client.request("POST", "/events/filter", json={"filter": failed}).json()["events"]
        if found or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert [event["resource"]["prefect.resource.name"] for event in found] == ["headway-gone-alert"]
    assert found[0]["payload"]["reason"] == "Notification failed"


def test_settings_do_not_take_what_is_no_address():
    with pytest.raises(ValueError, match="neither an address"):
        NotificationConfig(name="x", url="oncall@example.org")
    assert "secret" not in repr(NotificationConfig(name="x", url="json://u:secret@h/p"))


def test_mail_is_plain_text_unless_the_address_says_otherwise():
    def made(url):
        return address_of(NotificationConfig(name="x", url=url))

    assert made("mailto://h?from=c@b.org") == "mailto://h?from=c@b.org&format=text"
    assert made("mailtos://u:p@b.org") == "mailtos://u:p@b.org?format=text"
    assert made("mailto://h?from=c@b.org&format=html").endswith("format=html")
    assert made("json://h/p") == "json://h/p"


def test_the_command_tells_what_became_of_each_channel(sinks, fresh, tmp_path):
    fresh.path.mkdir()
    assert fresh.run("notify", "test").code == 6
    gone = free_port()
    channels = [{"name": name, "url": sink.address} for name, sink in sinks.items()]
    channels.append({"name": "gone", "url": f"json://secret:word@127.0.0.1:{gone}/"})
    (fresh.path / "platform.yaml").write_text(json.dumps({"notifications": channels}))
    for sink in sinks.values():
        sink.got.clear()
    ran = fresh.run("notify", "test")
    assert ran.code == 6 and [one["sent"] for one in ran.said["channels"]] == [True, True, False]
    assert "gone" in ran.said["error"]["message"] and "word" not in json.dumps(ran.said) + ran.stderr
    assert [sink.got[0][0] for sink in sinks.values()] == ["Headway: a test"] * 2
    assert fresh.ok("notify", "test", "mail").said["channels"] == [{"channel": "mail", "sent": True, "why": ""}]
    assert [len(sink.got) for sink in sinks.values()] == [1, 2]
    assert fresh.run("notify", "test", "nobody").code == 2


def test_sending_says_why_not():
    gone = NotificationConfig(name="gone", url=f"json://127.0.0.1:{free_port()}/")
    assert send(gone, "a", "b")
