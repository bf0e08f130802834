import re

import pytest

from benchmarks.images import IMAGES, ROOT, named_paths

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
        assert {"BASE", *image.arguments, *(image.on_debian or {})} <= arguments, name
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
