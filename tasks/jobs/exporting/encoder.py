"""Encoders (BertForMaskedLM and the like) as ONNX, by plain torch.onnx with dynamic shapes, and the proof of their logits.

Nothing is completed and there is no cache: the endpoint for completions does not serve what is made here. Causal models are
graph.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from tasks.formats.onnx_data import require_plain_folder
from tasks.jobs.exporting.comparison import largest
from tasks.jobs.exporting.graph import DATA, MODEL, architecture, copy_settings, forget_where_it_was_built

FAMILY = "ForMaskedLM"
OPSET = 20
TRACED_TOKENS = 8


def is_encoder(checkpoint: Path) -> bool:
    """Whether config.json names a network that fills in masked tokens."""
    return (architecture(checkpoint) or "").endswith(FAMILY)


def export_encoder(checkpoint: Path, output: Path, prompts: Sequence[str], *, threads: int) -> dict[str, float]:
    """Write model.onnx, its data, tokenizer and settings; the largest logit error over `prompts`, alone and padded together."""
    from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    network = AutoModelForMaskedLM.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    _write(Logits(network), output)
    tokenizer.save_pretrained(output)
    copy_settings(checkpoint, output)
    forget_where_it_was_built(output / MODEL, torch.__version__)
    require_plain_folder(output)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(output / MODEL, options, providers=["CPUExecutionProvider"])
    rows = [[int(token) for token in tokenizer(prompt)["input_ids"]] for prompt in prompts]
    batches = [_padded([row]) for row in rows] + [_padded(rows)]
    return {"max_logit_error": largest(_error(network, session, *batch) for batch in batches)}


class Logits(nn.Module):
    """Of a network, nothing else."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary]; `attention_mask` is 0 where a row is padded."""
        logits: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def _write(network: nn.Module, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    sample = torch.zeros((2, TRACED_TOKENS), dtype=torch.int64), torch.ones((2, TRACED_TOKENS), dtype=torch.int64)
    shape = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with torch.no_grad():
        program = torch.onnx.export(
            network,
            sample,
            dynamo=True,
            opset_version=OPSET,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": shape, "attention_mask": shape},
        )
    assert program is not None
    program.save(output / MODEL, external_data=True)
    if not (output / DATA).is_file():
        raise ValueError(
            f"torch.onnx wrote no {DATA}: its weights are in the graph; use a release of torch with external data"
        )


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and mask, each [rows, longest]."""
    longest = max(len(row) for row in rows)
    tokens, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, 1
    return tokens, mask


@torch.no_grad()
def _error(network: Any, session: Any, tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> float:
    """Largest absolute difference of a logit where there is a token."""
    expected = network(input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask)).logits.numpy()
    result = session.run(["logits"], {"input_ids": tokens, "attention_mask": mask})[0]
    return float(np.abs(result - expected)[mask.astype(bool)].max())
