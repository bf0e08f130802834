"""Variants in half the bits: matrices are stored as float16 or bfloat16, and made float32 when the graph is loaded.

The CPU provider has no attention with a cache in half precision (GroupQueryAttention is float32 there), so the graph that the
builder makes for `fp16` cannot be served on a CPU. This one can: the file is half as large, memory and speed are those of fp32.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tasks.jobs.exporting.graph import DATA, MODEL

KINDS = {
    "fp16": (np.dtype(np.float16), TensorProto.FLOAT16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
}
STORED = "/stored"


def halve(folder: Path, kind: str) -> None:
    """Rewrite an fp32 graph and its data. Raises ValueError for weights that are beyond the range of the kind."""
    model = onnx.load(folder / MODEL)
    dtype, element = KINDS[kind]
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        values = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore"):
            stored = values.astype(dtype)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise ValueError(f"{tensor.name} has weights beyond the range of {kind}")
        name = tensor.name
        tensor.Clear()
        tensor.CopyFrom(helper.make_tensor(name + STORED, element, values.shape, stored.tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [name + STORED], [name], name=f"{name}/Cast", to=TensorProto.FLOAT))
    for place, node in enumerate(casts):
        model.graph.node.insert(place, node)
    (folder / DATA).unlink()
    onnx.save(model, folder / MODEL, save_as_external_data=True, location=DATA, size_threshold=1024)
