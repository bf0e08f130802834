import re

import pytest

from benchmarks.images import IMAGES, ROOT, TORCH_CPU, BuildError, arguments_of, engine, named_paths, settings_for

pytestmark = pytest.mark.unit


def test_every_dockerfile_is_built_with_arguments_and_targets_that_it_has():
    dockerfiles = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("docker/*.Dockerfile"), *ROOT.glob(".devcontainer/Dockerfile")]
    }
    assert {image.dockerfile for image in IMAGES.values()} == dockerfiles
    for name, image in IMAGES.items():
        text = (ROOT / image.dockerfile).read_text()
        arguments = set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
        assert {"BASE", *image.arguments} <= arguments, name
        assert {image.target} - {""} <= set(re.findall(r"^FROM .* AS (\w+)", text, re.MULTILINE)), name


def test_files_and_folders_that_pip_is_told_of_are_mounted_and_addresses_are_not(tmp_path):
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    settings = {
        "extra-index-url": f"file://{tmp_path}/index/simple\\nhttps://packages.example/simple",
        "find-links": str(tmp_path / "wheels"),
        "cert": "/no/such/file.pem",
        "timeout": "180",
    }
    assert named_paths(settings) == [str(tmp_path / "index"), str(tmp_path / "wheels")]


def test_a_node_without_gpus_gets_the_slim_base_and_torch_for_cpus():
    image = IMAGES["cluster-cpu"]
    assert arguments_of(image, "")["BASE"].startswith("python:3.11.15-slim-bookworm@sha256:")
    assert arguments_of(image, "own") == {"BASE": "own", "PYTHON": "python3"}
    assert arguments_of(IMAGES["cluster"], "") == {}
    own = {"extra-index-url": "https://packages.example/simple"}
    assert settings_for(image, own) == {"extra-index-url": f"https://packages.example/simple {TORCH_CPU}"}
    assert settings_for(image, {}) == {"extra-index-url": TORCH_CPU}
    assert settings_for(IMAGES["cluster"], own) == own
    wheels = {"find-links": "/wheels"}
    assert settings_for(image, wheels) == wheels, "torch lies there"


def test_a_machine_without_a_builder_learns_what_is_missing_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"buildah is not installed; docker is not installed.*apt-get install buildah"):
        engine()


@pytest.mark.integration
def test_a_builder_that_does_not_work_is_named_with_its_own_reason(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(
        "#!/bin/sh\necho 'Client: 29' >&2\necho 'cannot connect to the daemon' >&2\nexit 1\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"`docker info` fails: cannot connect to the daemon\. .*or start Docker"):
        engine()
