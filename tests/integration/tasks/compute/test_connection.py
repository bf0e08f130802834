"""Commands and files through SSH, against real sshd: what is moved, what is not, jump hosts, time limits, broken connections."""

import pytest
from ssh_stand import PORT, ssh_stand
from waiting import limit

from tasks.common.errors import Missing
from tasks.compute import connection as files
from tasks.compute.connection import Connection, Unreachable, parse_address, run_all
from tasks.config.backends.ssh import SshConfig


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    with ssh_stand(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def there(stand):
    made = Connection(stand.machines[0].host, SshConfig(**stand.settings))
    yield made
    made.close()


def test_addresses():
    said = [parse_address(text) for text in ("gpu-1", "ops@gpu-1", "ops@10.0.0.4:2222", "[fd00::4]:22", "fd00::4")]
    assert [(a.user, a.name, a.port) for a in said] == [
        ("", "gpu-1", None),
        ("ops", "gpu-1", None),
        ("ops", "10.0.0.4", 2222),
        ("", "fd00::4", 22),
        ("", "fd00::4", None),
    ]
    for wrong in ("", "ops@", "a b", "gpu-1:ssh", "$(reboot)", "a;b"):
        with pytest.raises(ValueError, match="is no machine"):
            parse_address(wrong)


def test_only_what_changed_is_moved(there, tmp_path):
    here, remote = tmp_path / "here", tmp_path / "there"
    (here / "logs").mkdir(parents=True)
    (here / "job.json").write_text("{}")
    (here / "logs" / "rank-0.log").write_text("one\n")
    (here / "skipped").mkdir()
    (here / "skipped" / "big").write_text("x")
    (here / ".job.json.half").write_text("{")
    assert files.push(there, here, str(remote), skip=("skipped",)) == ["job.json", "logs/rank-0.log"]
    assert files.push(there, here, str(remote), skip=("skipped",)) == []
    assert sorted(p.name for p in remote.rglob("*")) == ["job.json", "logs", "rank-0.log"]

    (remote / "job.json").write_text("[]")  # the same size, another content
    with open(remote / "logs" / "rank-0.log", "a") as log:
        log.write("two\n")
    inode = (here / "logs" / "rank-0.log").stat().st_ino
    assert sorted(files.pull(there, str(remote), here)) == ["job.json", "logs/rank-0.log"]
    assert files.pull(there, str(remote), here) == []
    assert (here / "job.json").read_text() == "[]"
    assert (here / "logs" / "rank-0.log").read_text() == "one\ntwo\n"
    assert (here / "logs" / "rank-0.log").stat().st_ino == inode  # only the end was moved
    assert files.pull(there, str(tmp_path / "nothing"), here) == []


def test_single_files(there, tmp_path):
    files.write(there, f"{tmp_path}/a/b/file", b"bytes\x00")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "a" / "b").iterdir()] == [("file", b"bytes\x00")]
    (tmp_path / "plain").touch()
    with pytest.raises(Missing, match="plain/x on .* failed"):
        files.write(there, f"{tmp_path}/plain/x", b"")


def test_time_limits_and_machines_that_go(stand, there):
    with pytest.raises(Unreachable, match="gave no answer within 0.5 s"):
        there.run("sleep 60", seconds=0.5)
    assert there.run("cat; exit 3", stdin="said").code == 3
    other = Connection(stand.machines[1].host, there.settings)
    other.run("true")
    stand.machines[1].take_away()
    try:
        answers = run_all({there: "echo here", other: "echo here"}, seconds=limit(2))
        assert answers[there].stdout == "here\n"
        assert isinstance(answers[other], Unreachable)
    finally:
        stand.machines[1].start()
    assert other.run("echo back").stdout == "back\n"


def test_jump_host_is_used_and_its_key_verified(stand, tmp_path):
    """The second machine is reached under an address that only the first one has."""
    first, second = stand.machines
    first.inside("ip", "address", "add", "10.214.0.1/24", "dev", "eth0")
    second.inside("ip", "address", "add", "10.214.0.2/24", "dev", "eth0")
    text = (stand.folder / f"{second.name}.conf").read_text().replace(second.address, "10.214.0.2")
    text = text.replace(f"{second.name}.pid", "inner.pid")
    (stand.folder / "inner.conf").write_text(text)
    assert second.inside("/usr/sbin/sshd", "-f", stand.folder / "inner.conf").returncode == 0
    config = tmp_path / "config"
    config.write_text(f"Host inner\n  Hostname 10.214.0.2\n  Port {PORT}\n  User root\n  ProxyJump {first.host}\n")
    known = stand.known_hosts.read_text()
    inner = next(line.replace(second.address, "10.214.0.2") for line in known.splitlines() if second.address in line)
    jump = next(line for line in known.splitlines() if first.address in line)
    settings = {"key": str(stand.key), "config": str(config), "connect_seconds": 5.0}
    for lines, reached in (([inner, jump], True), ([inner], False)):
        (tmp_path / "known").write_text("\n".join(lines) + "\n")
        connection = Connection("inner", SshConfig(**settings, known_hosts=str(tmp_path / "known")))
        if reached:
            assert connection.run("echo $SSH_CONNECTION").stdout.split()[2] == "10.214.0.2"
        else:
            with pytest.raises(Missing, match="host key of inner is not known"):
                connection.run("true")


def test_settings_that_would_trust_anybody_or_name_no_file(stand, tmp_path):
    config = tmp_path / "config"
    config.write_text("Host *\n  UserKnownHostsFile none\n")
    host = stand.machines[0].host
    with pytest.raises(ValueError, match="trusts any host key"):
        Connection(host, SshConfig(key=str(stand.key), config=str(config))).run("true")
    with pytest.raises(ValueError, match="ssh.key is /nowhere/key"):
        Connection(host, SshConfig(key="/nowhere/key")).run("true")
