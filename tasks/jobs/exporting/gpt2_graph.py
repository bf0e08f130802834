"""GPT-2 as ONNX, which onnxruntime-genai's builder does not know: its own parts, put together in GPT-2's order.

What differs from the networks that it builds: learnt positions are added to the embeddings and none are rotated, LayerNorm has
biases, the feed-forward layer has no gate, one matrix gives queries, keys and values. When this is built and how it is proven
is tasks/jobs/export.py. Imported by it when there is a GPT-2 to export, for the builder takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from onnxruntime_genai.models import builder
from onnxruntime_genai.models.builders.base import Model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

RUNS_AS = "PhiForCausalLM"
"""Family that onnxruntime-genai is told: one whose decoder takes positions, and a cache a layer. Its `gpt2` is another graph."""
POSITIONS = "model.embed_positions.weight"


def build_gpt2(checkpoint: Path, output: Path, *, precision: str, cache: str, more: Mapping[str, Any]) -> None:
    """Write the ONNX model, its data, genai_config.json and the tokenizer; `more` are options of the builder."""
    config: Any = GPT2Config.from_pretrained(checkpoint, local_files_only=True)
    config.hidden_act, config.intermediate_size = config.activation_function, config.n_inner or 4 * config.n_embd
    messages = [f"{name}={value}" for name, value in more.items()]
    options = builder.parse_extra_options("", str(checkpoint), str(output), precision, "cpu", cache, messages)
    options |= {"hf_token": False, "hf_remote": False}
    io_dtype = builder.set_io_dtype(precision, "cpu", options)
    with torch.no_grad():
        graph = Gpt2Graph(config, io_dtype, builder.set_onnx_dtype(precision, options), "cpu", cache, options)
        graph.make_model(str(checkpoint))
    graph.save_model(str(output))
    graph.make_genai_config(config, {}, str(output))
    graph.save_processing(str(checkpoint), {}, str(output))


class Gpt2Graph(Model):  # type: ignore[misc]
    """The builder's graph with GPT-2's parts chosen."""

    def __init__(self, config: Any, *settings: Any) -> None:
        super().__init__(config, *settings)
        self.model_type = RUNS_AS
        self.layernorm_attrs["epsilon"] = config.layer_norm_epsilon
        self.layernorm_attrs["simple"] = False
        self.mlp_attrs["use_proj"], self.mlp_attrs["use_fc"] = False, True
        self.attention_attrs["rope"] = False

    def is_fused_rope_supported(self) -> bool:
        return False

    def load_weights(self, input_path: str) -> nn.Module:
        network = GPT2LMHeadModel.from_pretrained(input_path, local_files_only=True, dtype=torch.float32)
        self.positions = network.transformer.wpe.weight.detach()
        return Renamed(network)

    def make_embedding(self, embedding: Tensor) -> None:
        """Of the token, and of its position."""
        super().make_embedding(embedding)
        shape = self.make_hidden_state_shape()
        self.make_initializer(self.positions, POSITIONS, to=self.io_dtype)
        self.make_gather(
            "/model/embed_positions/Gather",
            [POSITIONS, self.input_names["position_ids"]],
            dtype=self.io_dtype,
            shape=shape,
            axis=0,
        )
        both = [self.layernorm_attrs["root_input"], "/model/embed_positions/Gather/output_0"]
        self.make_add("/model/embed_positions/Add", both, dtype=self.io_dtype, shape=shape)
        for name in ("root_input", "skip_input"):
            self.layernorm_attrs[name] = "/model/embed_positions/Add/output_0"


class Renamed(nn.Module):
    """A GPT-2 whose parts have the names, and lie in the order, in which the builder looks for them."""

    def __init__(self, network: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = network.transformer.wte
        self.model.layers = nn.ModuleList(Gpt2DecoderLayer(block) for block in network.transformer.h)
        self.model.norm = network.transformer.ln_f
        self.lm_head = network.lm_head


class Gpt2DecoderLayer(nn.Module):
    """One block; the builder knows a layer by the end of its class's name."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = block.ln_1, block.ln_2
        queries, keys, values = block.attn.c_attn.weight.chunk(3, dim=1)
        biases = block.attn.c_attn.bias.chunk(3)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj = _linear(queries, biases[0])
        self.self_attn.k_proj = _linear(keys, biases[1])
        self.self_attn.v_proj = _linear(values, biases[2])
        self.self_attn.o_proj = _linear(block.attn.c_proj.weight, block.attn.c_proj.bias)
        self.mlp.fc1 = _linear(block.mlp.c_fc.weight, block.mlp.c_fc.bias)
        self.mlp.fc2 = _linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """GPT-2 keeps its matrices [inputs, outputs], the other way round."""
    made = nn.Linear(*weight.shape)
    made.weight, made.bias = nn.Parameter(weight.T.contiguous()), nn.Parameter(bias.clone())
    return made
