"""A mixture is checked before Megatron sees it, and Megatron reads the one that we write."""

import json
import math

import pytest

from tasks.data.tokenizing.mixture import Part, blend, blend_file, data_arguments, parse_mixture
from tasks.formats.mmididx import TokenWriter


@pytest.fixture
def prefixes(tmp_path):
    for name, size in (("a", 500), ("b", 500), ("wide", 100_000)):
        writer = TokenWriter(tmp_path / name, size)
        writer.add_document([1, 2, 3])
        writer.close()
    return {name: str(tmp_path / name) for name in ("a", "b", "wide")}


def test_megatron_reads_weights_and_prefixes(prefixes):
    from megatron.core.datasets.utils import get_blend_from_list

    arguments = data_arguments(parse_mixture(["3", prefixes["a"], "1", prefixes["b"]]))
    names, weights = get_blend_from_list(list(arguments[1:]))
    assert arguments[0] == "--data-path"
    assert list(names) == [prefixes["a"], prefixes["b"]]
    assert math.isclose(weights[0], 0.75) and math.isclose(weights[1], 0.25)


def test_one_dataset_needs_no_weight(prefixes):
    from megatron.core.datasets.utils import get_blend_from_list

    assert get_blend_from_list(blend(parse_mixture(["5", prefixes["a"]]))) == ([prefixes["a"]], None)


def test_the_file_by_split_has_the_three_names_of_megatron(tmp_path):
    parts = [Part(1.0, tmp_path / "x")]
    file = json.loads(json.dumps(blend_file({"train": parts, "heldout": parts})))
    assert file == {"train": [str(tmp_path / "x")], "valid": [str(tmp_path / "x")], "test": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "weight and a prefix"),
        (["1"], "weight and a prefix"),
        (["{a}", "1"], "is no weight"),
        (["0", "{a}"], "above 0"),
        (["inf", "{a}"], "above 0"),
        (["1", "{a}", "1", "{a}"], "named twice"),
        (["1", "{a}x"], "does not exist"),
        (["1", "{a}", "1", "{wide}"], "different tokenizers"),
    ],
)
def test_what_is_no_mixture_is_refused(prefixes, words, said):
    with pytest.raises(ValueError, match=said):
        parse_mixture([word.format(**prefixes) for word in words])
