"""The suite `code`: completions that parse and run, and hostile ones: no harm to files, processes, network, memory, time."""

import json
import os
import platform
import shutil
import socket
import struct
import time
from pathlib import Path

import pytest
from suite_material import suite_bench, tiny_measured
from waiting import limit, until

from tasks.common.errors import Missing
from tasks.jobs.evaluation import sandbox
from tasks.jobs.evaluation.code_suite import SHIPPED_FILE, body_of, code, judge, parses, problem_of
from tasks.jobs.evaluation.sandbox import Limits, best_limits, run_code
from tasks.jobs.evaluation.suites import Line, run_suites

LIMITS = Limits(seconds=20.0, cpu_seconds=10, memory_bytes=512 << 20)
EXAMPLES = ">>> good()\n1\n"
GOOD = "\ndef good():\n    return 1\n"


def shipped():
    return [json.loads(line) for line in SHIPPED_FILE.read_text().splitlines()]


def as_problem(record):
    return problem_of(Line("functions.jsonl", record))


@pytest.fixture(scope="module")
def suite_model(tmp_path_factory):
    return tiny_measured(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", autouse=True)
def allowed():
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    assert best_limits(LIMITS, fall_back=False).namespaces, "this machine allows no namespaces"


@pytest.mark.parametrize(
    "some", [slice(0, None, 5), pytest.param(slice(None), marks=pytest.mark.long)], ids=["4", "all"]
)
def test_each_shipped_function_passes_with_its_solution_and_fails_with_another_body(some):
    assert len(shipped()) == 20 == len({record["name"] for record in shipped()})
    records = shipped()[some]
    solved = {record["name"]: judge(as_problem(record), record["solution"], LIMITS) for record in records}
    assert set(solved.values()) == {"passed"}, solved
    empty = {record["name"]: judge(as_problem(record), "    return None\n", LIMITS) for record in records}
    assert set(empty.values()) == {"failed"}, empty


def test_a_completion_ends_where_the_function_does_and_needs_a_body():
    assert body_of("    return 1\n\n    # more\n\ndef other():\n    boom(") == "    return 1\n\n    # more\n\n"
    prompt = 'def f():\n    """Doc."""\n'
    assert parses(prompt + "    return 1\n")
    assert not parses(prompt) and not parses(prompt + "    return (\n") and not parses("x = 1\n")
    assert not parses(prompt + "    return " + "(" * 5000)


def test_what_raises_what_is_wrong_and_what_leaves_early_does_not_pass():
    assert run_code(GOOD, EXAMPLES, LIMITS) == "passed"
    assert run_code("def good():\n    return 2\n", EXAMPLES, LIMITS) == "failed"
    assert run_code("raise SystemExit(0)", EXAMPLES, LIMITS) == "raised"
    assert run_code("import os\nos._exit(0)", EXAMPLES, LIMITS) == "died"
    assert run_code("import numpy" + GOOD, EXAMPLES, LIMITS) == "raised"  # the standard library is all there is
    forged = 'import os\nos.write(1, b\'{"verdict": {"attempted": 1, "failed": 0}}\\n\')\nos._exit(0)'
    assert run_code(forged, EXAMPLES, LIMITS) == "died"


def test_the_harness_itself_is_cut_from_what_the_code_may_see():
    seen = "import os\nassert os.environ == {}, 1\nassert os.getuid() == 65534\nassert os.getpid() == 1\n"
    seen += "assert sorted(os.listdir('/tmp')) == [] == [n for n in os.listdir('/') if n in ('work', 'proc', 'dev', 'home')]\n"
    seen += "assert len(os.listdir('/')) < 10\n"
    assert run_code(seen + GOOD, EXAMPLES, LIMITS) == "passed"


def caught(statement):
    """Code that passes only when the statement was refused."""
    modules = "os, socket, threading"
    return (
        f"import {modules}\ntry:\n    {statement}\nexcept (OSError, RuntimeError):\n    pass\nelse:\n    good = None\n"
    )


def refused(statement):
    source = caught(statement)
    return run_code(GOOD + source, EXAMPLES, LIMITS) == "passed"


def test_files_can_neither_be_written_nor_removed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    tmp_path.chmod(0o777)
    victim.chmod(0o666)
    for path in (str(victim), "/tmp/new", "new", "/usr/new", str(SHIPPED_FILE)):
        assert refused(f"open({path!r}, 'w').write('harm')"), path
    assert (
        refused(f"os.remove({str(victim)!r})")
        and refused("os.mkdir('/tmp/folder')")
        and refused("os.chmod('/usr', 0o777)")
    )
    assert victim.read_text() == "as it was" and os.listdir(tmp_path) == ["victim"]


def test_there_is_no_network_not_even_to_this_machine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        local.bind(str(tmp_path / "socket"))
        local.listen()
        (tmp_path / "socket").chmod(0o777)
        assert refused(f"socket.create_connection(('127.0.0.1', {port}), timeout=2)")
        assert refused("socket.create_connection(('8.8.8.8', 53), timeout=2)")
        assert refused(f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})")


def test_no_second_process_no_thread_and_no_signal_to_anybody():
    assert refused("os.fork()") and refused("threading.Thread(target=print).start()")
    assert (
        refused("os.execv('/usr/bin/true', ['true'])") is False
    )  # it may become another program, and gives no verdict then
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        break\n"
    assert run_code(bomb + GOOD, EXAMPLES, LIMITS) == "passed"
    assert refused(f"os.kill({os.getpid()}, 9)") and refused(f"os.kill({os.getppid()}, 9)")
    run_code("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)" + GOOD, EXAMPLES, LIMITS)
    assert os.getpid() and run_code(GOOD, EXAMPLES, LIMITS) == "passed"


def test_capabilities_and_mounts_do_not_come_back():
    back = "import ctypes\nlibc = ctypes.CDLL(None)\nflags = ctypes.c_ulong(32)\n"
    back += "assert libc.mount(None, b'/', None, flags, None) != 0\nassert libc.umount2(b'/usr', 2) != 0\n"
    back += "libc.unshare(0x10000000 | 0x20000)\nassert libc.mount(None, b'/', None, flags, None) != 0\n"
    back += "assert libc.umount2(b'/usr', 2) != 0\nassert libc.setuid(0) != 0\n"
    assert run_code(back + GOOD, EXAMPLES, LIMITS) == "passed"


def test_endless_loops_sleep_and_gluttony_end_in_time():
    short = Limits(seconds=2.0, cpu_seconds=1, memory_bytes=256 << 20)
    began = time.monotonic()
    assert run_code("while True:\n    pass", EXAMPLES, short) in ("died", "timeout")
    assert run_code("import time\ntime.sleep(1000)", EXAMPLES, short) == "timeout"
    stubborn = "import ctypes, os, signal, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
    stubborn += "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 15)]\ntime.sleep(1000)"
    assert run_code(stubborn, EXAMPLES, short) == "timeout"
    assert run_code("x = bytearray(1 << 40)", EXAMPLES, Limits(20.0, 10, 256 << 20)) == "raised"
    assert run_code("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", EXAMPLES, short) in (
        "raised",
        "died",
        "timeout",
    )
    assert time.monotonic() - began < limit(60)


def test_endless_output_is_neither_read_nor_kept():
    short = Limits(seconds=2.0, cpu_seconds=2, memory_bytes=256 << 20)
    for stream in (1, 2):
        flood = f"import os\nwhile True:\n    os.write({stream}, b'x' * 65536)"
        assert run_code(flood, EXAMPLES, short) in ("died", "timeout", "raised")
    assert run_code("def good():\n    while True:\n        print('x' * 65536)\n", EXAMPLES, short) != "passed"


def test_no_process_of_a_sandbox_is_left_even_when_it_leaves_its_group_and_its_parent():
    away = "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
    away += "for leave in (os.setsid, lambda: os.setpgid(0, 0)):\n    try:\n        leave()\n    except OSError:\n        pass\n"
    assert run_code(away + "time.sleep(1000)", EXAMPLES, Limits(1.0, 1, 256 << 20)) == "timeout"
    until(lambda: not [each for each in Path("/proc").glob("[0-9]*") if b"/inside.py" in command_of(each)])


def command_of(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


SYSTEM_CALLS = {
    "System V shared memory": "(29, 0, 768 << 20, 0o1600)",
    "memfd": "(319, b'x', 0)",
    "secret memory": "(447, 0)",
    "AF_VSOCK": "(41, 40, 1, 0)",
    "a pair of sockets": "(53, 1, 1, 0, 0)",
    "a user namespace": "(272, 0x10000000)",
    "a process in a user namespace": "(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "(435, 0, 0)",
    "a message queue": "(68, 0, 0o1600)",
    "io_uring": "(425, 1, 0)",
    "keys": "(250, 0, -3, 0)",
    "the parent's death": "(157, 1, 0, 0, 0, 0)",
    "a session": "(112,)",
    "the ABI x32": "(0x40000000 + 39,)",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_by_which_one_could_get_out_are_refused():
    code = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for name, call in SYSTEM_CALLS.items():
        code += f"assert libc.syscall(*{call}) == -1, {name!r}\n"
        code += f"assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), {name!r}\n"
    assert run_code(code + GOOD, EXAMPLES, LIMITS) == "passed"


def test_memory_is_bounded_by_whatever_way_it_is_asked_for():
    short = Limits(seconds=20.0, cpu_seconds=10, memory_bytes=256 << 20)
    shared = "import mmap\nkept, size = [], 16 << 20\nwhile True:\n    kept.append(mmap.mmap(-1, size))\n"
    shared += "    kept[-1].write(b'x' * size)\n"
    assert run_code(shared, EXAMPLES, short) == "raised"
    detached = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nfor _ in range(12):\n"
    detached += "    made = libc.shmget(0, 64 << 20, 0o1600)\n    assert made != -1\n"
    detached += "    place = libc.shmat(made, None, 0)\n    ctypes.memset(place, 1, 64 << 20)\n"
    detached += "    libc.shmdt(ctypes.c_void_p(place))\n"
    assert run_code(detached + GOOD, EXAMPLES, short) == "raised", "768 MiB through 256"
    for folder in ("/dev/shm", "/tmp", "/", "/run"):
        assert refused(f"open({folder + '/x'!r}, 'wb').write(b'x' * (1 << 20))"), folder


def test_without_bubblewrap_the_suite_refuses_and_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match="bubblewrap .bwrap. is not installed") as told:
        best_limits(LIMITS, fall_back=False)
    assert "Install bubblewrap (Debian's package `bubblewrap`)" in told.value.remedy


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_has_a_number_once_for_each_call(monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    lines = list(struct.iter_unpack("=HBBI", sandbox.seccomp_filter()))
    numbers = [value for code, _, no, value in lines if code == sandbox.EQUAL and no == 1]
    assert len(set(numbers)) == len(numbers) == len(sandbox.REFUSED) - (2 if machine == "aarch64" else 0)
    assert lines[-1] == (sandbox.RETURN, 0, 0, sandbox.ALLOW)


def test_a_machine_whose_numbers_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(Missing, match="no filter of system calls for riscv64"):
        sandbox.seccomp_filter()


def test_limits_alone_hold_where_root_asks_for_it():
    plain = Limits(20.0, 10, 512 << 20, namespaces=False)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    assert run_code(GOOD, EXAMPLES, plain) == "passed"
    for statement in (
        "os.fork()",
        f"os.kill({os.getpid()}, 9)",
        "open('/etc/passwd', 'a')",
        "os.write(os.open('/tmp/headway-e', os.O_CREAT | os.O_WRONLY), b'x')",
    ):
        assert run_code(GOOD + caught(statement), EXAMPLES, plain) != "failed", statement


def test_a_model_is_measured_on_the_shipped_functions(suite_model, tmp_path):
    told, _ = run_suites(suite_bench(tmp_path, suite_model, code={"problems": "shipped", "tokens": 8}), {"code": code})
    suite = told["code"]
    assert suite["samples"] == 20 and suite["details"]["namespaces"] is True
    assert suite["metrics"]["parse_share"] == suite["metrics"]["parse_count"] / 20
    assert 0 <= suite["metrics"]["pass_count"] <= suite["metrics"]["parse_count"] and suite["metrics"]["pass_high"] < 1
    assert sum(suite["details"]["outcomes"].values()) == 20


def test_bad_problem_files_are_told_with_their_line(suite_model, tmp_path):
    file = tmp_path / "problems.jsonl"
    good = json.dumps({key: shipped()[0][key] for key in ("name", "prompt")})
    for line, said in {
        "{": "line 2: no JSON",
        '{"name": "f"}': "line 2: `prompt` must be text",
        '{"name": "f", "prompt": "def f(:"}': "line 2: the prompt of f is not Python",
        '{"name": "f", "prompt": "def f():\\n    pass"}': "line 2: f must end in a function's docstring with examples",
    }.items():
        file.write_text(f"{good}\n{line}\n")
        with pytest.raises(ValueError, match=f"evaluation.code.problems: problems.jsonl, {said}"):
            code(suite_bench(tmp_path, suite_model, code={"problems": str(file)}))
