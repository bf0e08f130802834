# fork: gateways
"""A server that speaks as tasks/jobs/serve.py does and has no model: it answers as `behave.json` in its folder says.

So what a gateway does with servers that fail, lie or crawl is tested in seconds. It runs as a supervised process, like ours.
`behave.json`: `errors` (share of 500s), `seconds` (of an answer), `crowd` (seconds more for each request beside it),
`ready`, `drop` (share of connections closed without an answer), `text`, `figures` (of /metrics), `sticky` (keep
connections), `die` (exit at the next request), `gone` (its model dies at a request), `loading` and `mute` (no model answers,
and one is being loaded, or is not). What it was asked is in `asked.txt`, a line each. With `public.json` it listens on a
public port too, as servers of the release before gateways did.
"""

import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tasks.common import process
from tasks.common.process import read_json, write_json
from tasks.config.access import LOOPBACK
from tasks.serving.protocol.routes import GONE, LOADING, TRAFFIC, WANTED

PIECES = 4
MARKS = {"gone": [GONE], "loading": [LOADING], "mute": []}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    folder, told, lock, inflight = Path(), {}, threading.Lock(), 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        how = self.behave()
        if self.path == "/metrics" and "figures" in how:
            self.say(200, how["figures"].encode())
            return
        answers = not (how.get("loading") or how.get("mute"))
        ready = how.get("ready", True) and answers
        if self.headers.get(TRAFFIC) == WANTED:
            self.note(WANTED)
        state = {"ready": ready, "model": self.told["model_ref"], "server": self.folder.name, "reason": ""}
        state |= {"answers": answers, "loading": bool(how.get("loading"))}
        self.say(200 if ready else 503, json.dumps(state).encode())

    def do_POST(self):
        asked, how = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.behave()
        if self.headers["Host"].partition(":")[0] not in LOOPBACK:  # as a private port of ours
            self.say(400, b"Invalid host header")
            return
        with Handler.lock:
            Handler.inflight += 1
            beside = Handler.inflight - 1
        try:
            time.sleep(how.get("seconds", 0.0) + beside * how.get("crowd", 0.0))
            if how.get("die"):
                os._exit(7)
            if marked := next((name for name in MARKS if how.get(name)), ""):
                self.note(marked)
                self.say(503, b'{"error": {"message": "no model"}}', headers=MARKS[marked])
                return
            if random.random() < how.get("drop", 0.0):
                self.close_connection = True
                self.connection.close()
                return
            if random.random() < how.get("errors", 0.0):
                self.say(500, b'{"error": {"message": "as told"}}')
                return
            self.note(self.headers.get(TRAFFIC, "none"))
            if self.path == "/score":
                self.say(200, json.dumps([{"0": how.get("text", "x y")}]).encode(), tokens=5)
            elif asked.get("stream"):
                self.stream(how)
            else:
                self.say(200, json.dumps(self.answer(asked, how)).encode())
        finally:
            with Handler.lock:
                Handler.inflight -= 1

    def note(self, what):
        with open(self.folder / "asked.txt", "a") as file:
            file.write(f"{what}\n")

    def answer(self, asked, how):
        choice = {"index": 0, "text": how.get("text", "x y"), "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": asked.get("max_tokens", 4), "total_tokens": 5}
        return {"id": "cmpl-1", "model": self.told["model_ref"], "choices": [choice], "usage": usage}

    def stream(self, how):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(PIECES):
            said = json.dumps({"choices": [{"text": f"{number} ", "finish_reason": None}]})
            self.chunk(f"data: {said}\n\n".encode())
            time.sleep(how.get("pause", 0.05))
            if how.get("break") == number:
                self.close_connection = True
                self.connection.close()
                return
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def say(self, status, body, *, tokens=0, headers=()):
        self.send_response(status)
        for name in headers:
            self.send_header(name, "1")
        if status == 503:
            self.send_header("Retry-After", "2")
        if tokens:
            self.send_header("X-Headway-Tokens", str(tokens))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if not self.behave().get("sticky"):
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def behave(self):
        return read_json(self.folder / "behave.json") or {}


def spec(folder):
    """How it is supervised."""
    paths = [
        str(Path(__file__).parents[2]),
        str(Path(__file__).parent),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    env = {"HEADWAY_SERVE": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    argv = [sys.executable, str(Path(__file__).absolute())]
    return process.ProcessSpec(argv=argv, env=env, secrets=(), log="server.log", restarts=5, steady=1.0, grace=5.0)


def start(endpoint, name, ref, *, port, replicas=None, **behave):
    """Start one in an endpoint's folder; its record, as endpoint.json has it."""
    folder = endpoint / "servers" / name
    told = {"port": port, "model_ref": ref, "model_folder": str(endpoint), "files": [], "replicas": replicas or {}}
    write_json(folder / "serve.json", told)
    write_json(folder / "behave.json", behave)
    process.start(folder, spec(folder))
    return {"model_ref": ref, "folder": str(folder)}


if __name__ == "__main__":
    Handler.folder = Path(os.environ["HEADWAY_SERVE"])
    Handler.told = read_json(Handler.folder / "serve.json")
    ThreadingHTTPServer.request_queue_size = 128
    if public := read_json(Handler.folder / "public.json"):
        ThreadingHTTPServer.allow_reuse_port = True  # from Python 3.11 on
        old = ThreadingHTTPServer(("127.0.0.1", public["port"]), Handler)
        threading.Thread(target=old.serve_forever, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", Handler.told["port"]), Handler).serve_forever()
