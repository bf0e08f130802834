"""What a command is not made to do by the folder that it is typed in, by its environment, or by a name that moves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import Home
from waiting import limit

from deployments.publishing.base_models import convert
from deployments.services.prefect_server import named_server, prepare
from flows.support.continuing import _origins
from tasks.common.errors import IntegrityError, Refused
from tasks.compute.job import Job
from tasks.security.policy import add_person

ELSEWHERE = "http://127.0.0.1:9/api"
LOOK = """
from deployments.services.library_settings import take_no_files
{}
from prefect.settings import Settings, get_current_settings
print(get_current_settings().api.url, Settings().api.url)
"""
FILES = {
    ".env": f"PREFECT_API_URL={ELSEWHERE}\n",
    "prefect.toml": f"[api]\nurl = '{ELSEWHERE}'\n",
    "pyproject.toml": f"[tool.prefect.api]\nurl = '{ELSEWHERE}'\n",
    "profiles.toml": f"active = 'one'\n[profiles.one]\nPREFECT_API_URL = '{ELSEWHERE}'\n",
}


def seen(folder, before=""):
    """What Prefect takes for the address of its server, when it is imported and later, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    told = {**clean, "PREFECT_HOME": str(folder.parent / "prefect"), "PYTHONPATH": str(Path(__file__).parents[3])}
    code = LOOK.format(before)
    argv = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(argv, cwd=folder, env=told, capture_output=True, text=True, timeout=limit(120), check=True)
    assert not ran.stderr, "no warning of a library's about what was left out"
    return ran.stdout.split()


def lay(folder, names):
    """Put files that choose a server into a folder."""
    folder.mkdir()
    for name in names:
        if name == "a link":
            (folder.parent / "elsewhere").write_text(FILES[".env"])
            (folder / ".env").symlink_to(folder.parent / "elsewhere")
        elif name == "a profile":
            (folder / "profiles.toml").write_text(FILES["profiles.toml"])
            with open(folder / ".env", "a") as file:
                file.write(f"PREFECT_PROFILES_PATH={folder}/profiles.toml\n")
        else:
            (folder / name).write_text(FILES[name])
    return folder


EACH = (".env", "prefect.toml", "pyproject.toml", "a profile", "a link")


@pytest.mark.parametrize(
    "names", [EACH[:4], *(pytest.param((name,), marks=pytest.mark.long) for name in EACH)], ids=" and ".join
)
def test_no_file_of_the_working_directory_chooses_the_server(tmp_path, names):
    folder = lay(tmp_path / "folder", names)
    assert seen(folder) == [ELSEWHERE, ELSEWHERE], "what Prefect does by itself"
    assert seen(folder, "take_no_files()") == ["None", "None"]


def test_matplotlib_draws_as_it_is_made_whatever_lies_there(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    code = LOOK.split("{}")[0] + "{}\nimport matplotlib\nprint(matplotlib.rcParams['text.usetex'])"
    told = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for before, seen in (("", "True"), ("take_no_files()", "False")):
        argv = [sys.executable, "-P", "-c", code.format(before)]
        ran = subprocess.run(
            argv, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=limit(120), check=True
        )
        assert ran.stdout.split() == [seen], ran.stderr


def test_a_server_that_the_policy_does_not_list_says_nothing_of_who_started_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", ELSEWHERE)
    assert named_server(tmp_path) == ELSEWHERE.removesuffix("/api"), "without a policy everyone may do everything"
    add_person(tmp_path, "anna", ())
    with pytest.raises(Refused, match="does not list"):
        named_server(tmp_path)
    with pytest.raises(Refused) as refused:
        prepare(tmp_path)
    assert "prefect_servers" in refused.value.remedy and not (tmp_path / "prefect").exists()
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy.read_text() + f"prefect_servers: ['{ELSEWHERE}/']\n")
    add_person(tmp_path, "ben", ("run",))
    assert named_server(tmp_path) == ELSEWHERE.removesuffix("/api"), "also after the policy was written anew"
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert named_server(tmp_path) is None


def test_a_policy_that_lists_no_server_is_written_as_before(tmp_path):
    add_person(tmp_path, "anna", ())
    assert "prefect_servers" not in (tmp_path / "policy.yaml").read_text()


def test_no_package_of_the_working_directory_is_imported(tmp_path, monkeypatch):
    """Another user's folder may have one of our names, or of a library's, in it."""
    for package in ("tasks", "json"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").write_text("no model")
    with pytest.raises(ValueError, match="cannot be made"):
        convert(tmp_path / "x.gguf", tmp_path / "made")
    job = Job(name="train", token="0" * 64, program="tasks.jobs.train", settings={}, inputs={})
    with pytest.raises(IntegrityError):
        _origins(job, tmp_path / "checkpoints", "no", "such", "words")
    assert not (tmp_path / "ran").exists()


def test_who_signs_in_a_home_with_a_policy_names_the_version(tmp_path, monkeypatch):
    """The store says which one is the newest."""
    monkeypatch.setenv("HEADWAY_PERSON", "anna")
    monkeypatch.setenv("HEADWAY_TOKEN", add_person(tmp_path, "anna", ()))
    for ref in ("model/tiny", f"model/tiny@{'a' * 8}"):
        refused = Home(tmp_path).run("sign", ref, "--reason", "mine")
        assert refused.code == 2 and "names no version" in refused.said["error"]["message"]
