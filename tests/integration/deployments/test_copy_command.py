"""`headway copy`, `backup` and `restore` as they are typed: what they say, and how they end when they are used wrongly."""

import pytest
from support import Home


@pytest.fixture
def home(tmp_path):
    """A home with one dataset. No server runs, so nothing is to be stopped."""
    made = Home(tmp_path / "home")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    made.ok("dataset", "publish", "few", folder)
    return made


def test_a_dataset_is_copied_once_and_back_under_its_version(home):
    first = home.ok("copy", "dataset/few", "--to", "./team", "--reason", "for team B").said
    assert first["moved"] and first["files"] == 1 and first["to"].endswith("/team") and first["noted_in_source"]
    again = home.ok("copy", "dataset/few", "--to", "./team").said
    assert not again["moved"] and again["ref"] == first["ref"]
    (home.path.parent / "theirs" / "home").mkdir(parents=True)
    theirs = Home(home.path.parent / "theirs" / "home")
    back = theirs.ok("copy", "dataset/few", "--from", "../team", "--to", "local").said
    assert back["ref"] == first["ref"]
    assert theirs.ok("verify", "dataset/few").said["ok"]
    entry = home.ok("audit-log", "--what", "copy").said["entries"][0]
    assert (entry["reason"], entry["right"]) == ("for team B", "publish")


def test_the_policy_is_asked_before_anything_leaves(home):
    home.ok("person", "add", "ada")
    ran = home.run("copy", "dataset/few", "--to", "./team")
    assert ran.code == 2 and not (home.path.parent / "team").exists()
    assert home.run("backup", "--to", "./backups").code == 2 and not (home.path.parent / "backups").exists()


WRONG = (
    (("copy", "dataset/none", "--to", "./team"), 2, "not in"),
    (("copy", "dataset/few", "--to", "team"), 2, "stores.yaml"),
    (("copy", "dataset/few", "--to", "local"), 2, "where it comes from"),
    (("copy", "dataset/few", "--to", "./not/mounted"), 6, "no folder"),
    (("copy", "dataset/few", "--to", "registry"), 2, "takes models"),
    (("copy", "model/few", "--to", "registry"), 6, "does not let us in"),
    (("backup", "--to", "local"), 2, "where it comes from"),
    (("backup", "--to", "./backups", "--drill"), 2, "no backup"),
    (("backup", "--to", "./backups", "--drill", "--keep", "2"), 2, "makes no backup"),
    (("restore", "--from", "./backups"), 2, "no backup"),
)


def test_wrong_use_says_what_to_do(home):
    (home.path / "stores.yaml").write_text("stores:\n  registry: {uri: 'azureml://registries/team'}\n")
    for words, code, why in WRONG:
        ran = home.run(*words)
        error = ran.said["error"]
        assert ran.code == code and why in error["message"] and error["remedy"] is not None, (words, ran.said)


def test_what_is_damaged_is_told_with_exit_code_5_and_the_rest_is_safe(home):
    ref = home.ok("artifacts", "dataset").said["artifacts"][0]["ref"]
    path = home.folder_of(ref) / "files" / "a.jsonl"
    path.chmod(0o644)
    path.write_text('{"text": "two"}\n')
    ran = home.run("backup", "--to", "./backups")
    assert ran.code == 5 and ran.said["damaged"] == [ref] and ran.said["documents"] > 0
    assert home.run("copy", "dataset/few", "--to", "./team").said["error"]["problems"][0]["path"] == "a.jsonl"
