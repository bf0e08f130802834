"""Fault 56: a safetensors file whose header is a bomb, or whose tensors overlap, is refused at once and in little memory."""

import json
import resource
import struct
import time

import pytest
from waiting import limit

from tasks.formats.model_folder import open_model_folder

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8}


def write(folder, header, data=b"", *, length=None):
    """A folder with one crafted file of weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    begins = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(begins + text + data)
    return folder


def tensor(begin, end):
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_a_sound_one_is_read(tmp_path):
    found = open_model_folder(write(tmp_path / "m", {"a": tensor(0, 8), "b": tensor(8, 16)}, bytes(16)))
    assert found.tensors == {"a": (2,), "b": (2,)}


CRAFTED = {
    "a header of 2^63 bytes": lambda at: write(at, {}, length=1 << 63),
    "a header longer than the file": lambda at: write(at, {}, length=99),
    "a header that is no JSON": lambda at: write(at, b"{" * 100_000),
    "tensors that overlap": lambda at: write(at, {"a": tensor(0, 12), "b": tensor(4, 16)}, bytes(16)),
    "the same bytes twice": lambda at: write(at, {"a": tensor(0, 16), "b": tensor(0, 16)}, bytes(16)),
    "a gap": lambda at: write(at, {"a": tensor(0, 4), "b": tensor(8, 16)}, bytes(16)),
    "a place before the beginning": lambda at: write(at, {"a": tensor(-8, 16)}, bytes(16)),
    "a tensor beyond the end": lambda at: write(at, {"a": tensor(0, 1 << 40)}, bytes(16)),
    "a tensor without a place": lambda at: write(at, {"a": {"shape": [4]}}, bytes(16)),
    "a tensor that is a number": lambda at: write(at, {"a": 4}, bytes(16)),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_header_is_refused_at_once_and_in_little_memory(tmp_path, what):
    folder = CRAFTED[what](tmp_path / "m")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match="safetensors"):
        open_model_folder(folder)
    assert time.process_time() - began < limit(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_the_library_that_loads_the_weights_refuses_them_too(tmp_path):
    from safetensors import SafetensorError, safe_open

    for number, what in enumerate(("a header of 2^63 bytes", "tensors that overlap", "a tensor beyond the end")):
        folder = CRAFTED[what](tmp_path / str(number))
        with pytest.raises(SafetensorError):
            safe_open(folder / "model.safetensors", "np")
