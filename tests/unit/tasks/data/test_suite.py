"""The file of a user's suite: what it may hold, by what it is told apart, and whose code it may name."""

import json

import pytest

from tasks.config.base import digest
from tasks.config.data import ValidationConfig
from tasks.data.suite import FOLDER, PLUGINS, RESULTS, forget, read_suite

pytestmark = pytest.mark.unit
BETWEEN = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "bytes", "max_value": 9}}


@pytest.fixture
def suite(tmp_path):
    """Writes a suite, and reads it in a home whose plugins folder holds `mine.py`."""
    plugins = tmp_path / FOLDER / PLUGINS
    plugins.mkdir(parents=True, mode=0o755)
    (plugins / "mine.py").write_text("class ExpectMine: ...")
    (plugins / "mine.py").chmod(0o644)

    def make(content, name="rules.json"):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return read_suite(tmp_path / name, tmp_path)

    make.plugins = plugins
    return make


def test_a_suite_is_told_apart_by_what_it_expects_and_by_its_code(suite):
    mine = {"type": "mine.ExpectMine", "kwargs": {"column": "bytes"}}
    first = suite({"expectations": [BETWEEN, mine]})
    assert (first.name, [each["type"] for each in first.expectations]) == (
        "rules",
        [BETWEEN["type"], "mine.ExpectMine"],
    )
    assert list(first.code) == ["mine.py"]
    stored = {"id": "5", "meta": {"by": "<b>anna</b>"}, "notes": "why", "severity": None, "description": "<script>"}
    assert suite({"expectations": [{**BETWEEN, **stored}, mine]}).digest == first.digest
    assert suite({"name": "other", "expectations": [BETWEEN, mine]}).digest != first.digest
    assert suite({"expectations": [mine, BETWEEN]}).digest != first.digest
    (suite.plugins / "mine.py").write_text("class ExpectMine: other = 1")
    assert suite({"expectations": [BETWEEN, mine]}).digest != first.digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "no list of `expectations`"),
        ({"expectations": []}, "no list of `expectations`"),
        ({"expectations": [7]}, "expectation 1 needs a `type`"),
        ({"expectations": [BETWEEN, {"type": "x", "kwargs": []}]}, "expectation 2 needs a `type`, and `kwargs`"),
        ({"expectations": [{**BETWEEN, "mostly": 0.5}]}, "expect_column_values_to_be_between: unknown mostly"),
        ({"name": "../up", "expectations": [BETWEEN]}, "`name` must be letters"),
        ({"expectations": [{"type": "x", "kwargs": {"row_condition": "@f()"}}]}, "row_condition is refused"),
        ({"expectations": [{"type": "x", "kwargs": {"value_set": ["<b>"]}}]}, "`<` is refused"),
        ({"expectations": [{"type": "os.system"}]}, "os.py cannot be read"),
    ],
)
def test_what_is_no_suite_is_refused_by_its_place(suite, content, words):
    with pytest.raises(ValueError, match=words):
        suite(content)


def test_an_error_repeats_nothing_of_a_file_that_is_no_suite(suite):
    with pytest.raises(ValueError) as error:
        suite("token: hunter2")
    assert "hunter2" not in str(error.value)


def test_code_comes_from_files_that_nobody_else_can_write(suite, tmp_path):
    content = {"expectations": [{"type": "mine.ExpectMine"}]}
    (suite.plugins / "mine.py").chmod(0o666)
    with pytest.raises(ValueError, match="can be written by others than you"):
        suite(content)
    (suite.plugins / "mine.py").chmod(0o644)
    suite.plugins.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others than you"):
        suite(content)
    suite.plugins.chmod(0o755)
    (suite.plugins / "mine.py").unlink()
    (tmp_path / "elsewhere.py").write_text("class ExpectMine: ...")
    (suite.plugins / "mine.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(ValueError, match="code of expectations is taken from there alone"):
        suite(content)


def test_a_configuration_without_a_suite_is_what_it_was():
    assert "suite" not in ValidationConfig().model_dump(mode="json")
    assert digest(ValidationConfig(suite="a.json").model_dump(mode="json")) != digest(
        ValidationConfig().model_dump(mode="json")
    )


def test_the_results_of_a_verdict_go_with_it(tmp_path):
    forget(tmp_path, "a" * 64)  # a home that never judged
    for place in RESULTS:
        for run in ("a" * 16, "b" * 16):
            (tmp_path / FOLDER / place / "corpus-documents" / run / "now").mkdir(parents=True)
    forget(tmp_path, "a" * 64)
    left = {path.name for place in RESULTS for path in (tmp_path / FOLDER / place).glob("*/*")}
    assert left == {"b" * 16}
