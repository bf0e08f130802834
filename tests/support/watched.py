"""An endpoint whose answers are made up and which runs as long as this process does: what the watch looks at."""

import json
import os
import time
from dataclasses import replace

from answers import answers, every

from tasks.common import process
from tasks.common.process import write_json
from tasks.events.ledger import Ledger
from tasks.formats.answers import Label, line
from tasks.serving.local.endpoint import outputs_of

MODEL = "model/tiny@" + "1" * 64


class Watched:
    """State: how many files there are. Answers come a thousandth of a second apart, and are over when `write` returns."""

    def __init__(self, home, name="api"):
        self.home, self.name, self.count = home, name, 0
        server = home / "endpoints" / name / "servers" / "s"
        me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
        write_json(server / "handle.json", me)
        write_json(server / "serve.json", {"model_folder": "/nowhere", "files": []})
        write_json(server / "public.json", {"port": 1})  # as one of a release without a gateway, which a test cannot be
        record = {"folder": str(server), "model_ref": MODEL, "url": "http://127.0.0.1:1", "port": 1}
        write_json(home / "endpoints" / name / "endpoint.json", record)
        self.folder = outputs_of(home / "endpoints" / name, MODEL)

    def write(self, count, change=lambda answer: answer, *, right=None):
        """So many answers, changed; with `right`, each is labelled so."""
        self.count += 1
        now = time.time()
        made = every(1, answers(count, seed=[11, self.count], begins=now), change)
        made = [replace(a, time=now + place / 1000, id=f"r{self.count}-{place}") for place, a in enumerate(made)]
        self._append(self.folder, made)
        if right is not None:
            said = [Label(a.time, a.id, a.time, float(right(place)), MODEL) for place, a in enumerate(made)]
            self._append(self.folder / "feedback", said)
        time.sleep(max(0.0, max(a.time + a.seconds for a in made) - time.time() + 0.05))

    def events(self):
        """What was said, oldest first."""
        with Ledger(self.home).snapshot() as db:
            rows = db.execute("SELECT * FROM events WHERE name = 'endpoint.anomaly' ORDER BY number")
            return [{**dict(row), "data": json.loads(row["data"])} for row in rows]

    def _append(self, folder, told):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "s-000001.jsonl", "ab") as file:
            file.write(b"".join(map(line, told)))


def loop(answer):
    return replace(answer, repetition=0.9)
