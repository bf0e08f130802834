"""What machines reached through SSH call their files: nothing that one says leads out of our folder. A real SSH server."""

import asyncio
import subprocess
import threading

import asyncssh
import pytest
from waiting import limit

from tasks.common.errors import IntegrityError
from tasks.compute import connection as files
from tasks.compute.connection import Connection
from tasks.config.backends.ssh import SshConfig


class Machine:
    """Runs commands in this machine's shell; what `lies` says comes in place of a listing."""

    def __init__(self, folder):
        self.lies = ""
        self._loop, host, own = asyncio.new_event_loop(), *(asyncssh.generate_private_key("ssh-ed25519") for _ in "ab")
        own.write_private_key(str(folder / "key"))
        (folder / "authorized").write_bytes(own.export_public_key())
        self._options = {
            "server_host_keys": [host],
            "authorized_client_keys": str(folder / "authorized"),
            "process_factory": self._run,
            "sftp_factory": True,
        }
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(limit(30))
        port = self._server.get_port()
        public = host.export_public_key().decode()
        (folder / "known").write_text(f"[127.0.0.1]:{port} {public}")
        settings = SshConfig(key=str(folder / "key"), known_hosts=str(folder / "known"))
        self.connection = Connection(f"somebody@127.0.0.1:{port}", settings)

    async def _listen(self):
        return await asyncssh.listen("127.0.0.1", 0, **self._options)

    async def _run(self, process):
        said = self.lies.encode() or subprocess.run(["sh", "-c", process.command], capture_output=True).stdout
        process.stdout.write(said.decode())
        process.exit(0)

    def stop(self):
        self.connection.close()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    yield made
    made.stop()


def listing(*names):
    return "".join(f"{name}\0{2}\0{1.5}\0" for name in names)


@pytest.mark.parametrize("name", ["../policy.yaml", "/tmp/x/policy.yaml", "logs/../../policy.yaml", "a\\..\\b", "a\nb"])
def test_a_listing_that_leads_out_of_the_folder_brings_nothing(machine, tmp_path, name):
    (tmp_path / "policy.yaml").write_text("ours")
    here, remote = tmp_path / "job", tmp_path / "remote" / "job"
    here.mkdir()
    remote.mkdir(parents=True)
    (remote / "good").write_text("{}")
    (remote.parent / "policy.yaml").write_text("theirs")
    machine.lies = listing("good", name)
    with pytest.raises(IntegrityError) as refused:
        files.pull(machine.connection, str(remote), here)
    assert repr(name) in refused.value.message and str(remote) in refused.value.message
    assert list(here.iterdir()) == [] and (tmp_path / "policy.yaml").read_text() == "ours"


def test_a_name_with_a_line_break_is_one_name_and_not_the_names_of_others(machine, tmp_path):
    """Read line by line, the first would be `a`, with a size and a time that it says itself, and then policy.yaml."""
    here, remote = tmp_path / "job", tmp_path / "remote"
    remote.mkdir()
    (remote / "a\n2\n1.5\nb").write_text("{}")
    with pytest.raises(IntegrityError, match="control sign"):
        files.pull(machine.connection, str(remote), here)
    (remote / "a\n2\n1.5\nb").unlink()
    (remote / "plain\u2028name").write_text("{}")
    assert files.pull(machine.connection, str(remote), here) == ["plain\u2028name"]
    assert (here / "plain\u2028name").read_text() == "{}"


def test_what_goes_there_may_have_any_name(machine, tmp_path):
    here, remote = tmp_path / "job", tmp_path / "remote"
    here.mkdir()
    (here / "a\nb").write_text("{}")
    assert files.push(machine.connection, here, str(remote)) == ["a\nb"]
    assert (remote / "a\nb").read_text() == "{}" and files.push(machine.connection, here, str(remote)) == []
