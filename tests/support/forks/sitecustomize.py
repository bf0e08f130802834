"""Hands a starting interpreter over to a process that has imported what its program needs (tests/support/fork_server.py).

Python imports this module at its start because the tests put this folder on PYTHONPATH. It does nothing but for the programs
that `program` names, in the namespaces of the tests. Then this process stays what its starter knows: it passes on signals, dies
with its fork as its fork dies with it, and ends as its fork ended.
"""

import os
import sys
import time

FOLDER = "TESTS_FORK_SERVER"
JOBS = ("train", "evaluate", "export", "benchmark", "preprocess", "profile", "drift")
COMMANDS = (
    "deployments.watch",
    "prefect.engine",
    "prefect.runner._workspace_supervisor",
    "tasks.data.judging",
    "tasks.lineage.publish",
    "tasks.lineage.server",
    "uvicorn",
)
MODULES = {f"tasks.jobs.{name}": "jobs" for name in JOBS} | {"torch.distributed.run": "jobs"}
MODULES |= {"tasks.jobs.gateway": "gateways"} | dict.fromkeys(COMMANDS, "commands")
SCRIPTS = ("/bin/headway", "/tests/integration/flows/asking.py")
MARK = "# fork: "
"""What the first line of a test's own program begins with, a script's or that of `-c`; the server for it follows."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""What execnet, by which pytest-xdist starts its workers, has Python run."""
WORKER_SECONDS = 300.0
"""A worker that is not forked by then imports everything by itself."""
WANTED = 3
"""Programs of a kind before its server is started: a run of one test is faster without."""


def program(words):
    """Which server knows the program of a command line, and where that program begins in it; None for all others."""
    position = 1
    while position < len(words) and words[position] in ("-u", "-P"):
        position += 1
    rest = words[position:]
    if len(rest) > 1 and rest[0] == "-m" and rest[1] in MODULES:
        return MODULES[rest[1]], position
    if rest and rest[0].endswith(SCRIPTS):
        return "commands", position
    if rest == ["-c", WORKER] and "COVERAGE_PROCESS_START" not in os.environ:  # which counts imports too
        return "workers", position
    kind = marked(rest)
    return (kind, position) if kind else None


def marked(rest):
    """The server that a program's own first line names."""
    try:
        if len(rest) > 1 and rest[0] == "-c":
            line = rest[1]
        elif rest and rest[0].endswith(".py"):
            with open(rest[0], encoding="utf-8") as file:
                line = file.readline()
        else:
            return None
    except OSError:
        return None
    return line[len(MARK) :].split("\n")[0].strip() if line.startswith(MARK) else None


def surroundings():
    """What a fork shares with its server, whatever this process's own is."""
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "pid", "user")]
    with open("/proc/self/cgroup") as file:
        return [*spaces, os.geteuid(), os.getegid(), os.stat("/").st_ino, file.read()]


def hand_over(socket_path, position):
    """Have the server run this command line; does not return unless it refuses or is not there."""
    import array
    import json
    import resource
    import signal
    import socket

    connection = _connected(socket_path, position)
    if connection is None:
        return
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = sorted(number for number in files if number != connection.fileno() and _is_open(number))
    passed = [number for number in files if number <= 2 or os.get_inheritable(number)]
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    mask = os.umask(0)
    os.umask(mask)
    request = {
        "words": sys.orig_argv,
        "position": position,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "safe": sys.flags.safe_path,
        "files": passed,
        "ignored": ignored,
        "umask": mask,
        "parent": os.getppid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"
        },
        "surroundings": surroundings(),
        "nice": os.nice(0),
    }
    text = json.dumps(request).encode()
    connection.sendmsg(
        [len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))]
    )
    connection.sendall(text)
    answers = connection.makefile("rb")  # a fork may have ended before its start is read here: two lines
    answer = json.loads(answers.readline() or b'{"refused": "gone"}')
    if "refused" in answer:
        connection.close()
        return
    child = answer["pid"]
    for number in (1, 2, 3, 10, 12, 15, 18):  # HUP INT QUIT USR1 USR2 TERM CONT
        if number not in ignored:
            signal.signal(number, lambda got, _: _pass_on(child, got))
    for number in files:
        if number > 2:
            _close(number)
    end = answers.readline()
    if not end:
        os._exit(255)  # the server is gone, and its forks with it
    code = json.loads(end)["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def _connected(socket_path, position):
    """A connection to the server; None where it does not answer. Who asks for it often enough has it started."""
    import socket

    kind = os.path.basename(socket_path)
    if kind == "workers":
        _await_start(socket_path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(socket_path)
    except OSError:
        # Who supervises a part of the platform ends whatever came of it: a server that one started would end at `headway down`.
        if kind != "workers" and (kind != "commands" or sys.orig_argv[position] != "-m"):
            _want(socket_path)
        return None
    return connection


def _await_start(socket_path):
    """Four workers that import the same at once take four times as long as one that imports it for all of them."""
    until = time.monotonic() + WORKER_SECONDS
    while not os.path.exists(socket_path) and os.path.exists(socket_path + ".wanted") and time.monotonic() < until:
        time.sleep(0.05)


def _want(socket_path):
    """Count this program; the one that makes them enough starts the server, and all go on by themselves until it answers."""
    counter = os.open(socket_path + ".wanted", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(counter, b".")
    count = os.fstat(counter).st_size
    os.close(counter)
    if count == WANTED:
        start_server(socket_path)


def start_server(socket_path):
    """Start the server of a kind, whose name is the socket's; it answers when it has imported everything."""
    import subprocess

    with open(socket_path + ".wanted", "wb") as counter:
        counter.write(b"." * WANTED)
    here = os.path.dirname(os.path.abspath(__file__))
    keep = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", FOLDER)
    with open(socket_path + ".log", "ab") as log:
        subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(here), "fork_server.py"), socket_path],
            env={key: value for key, value in os.environ.items() if key in keep},
            cwd=os.path.dirname(os.path.dirname(here)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _pass_on(child, number):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _close(number):
    try:
        os.close(number)
    except OSError:
        pass


def main():
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    found = program(sys.orig_argv)
    if found:
        hand_over(os.path.join(folder, found[0]), found[1])


main()
