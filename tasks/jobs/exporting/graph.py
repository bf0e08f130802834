"""A Hugging Face folder as an ONNX graph: the folder that a server loads, of one precision. That both say the same is proven
elsewhere (comparison.py); GPT-2's own graph is below, encoders are encoder.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime_genai as genai
import torch
from onnxruntime_genai.models import builder
from onnxruntime_genai.models.builders.base import Model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from tasks.formats.model_folder import declared_positions, require_positions
from tasks.formats.onnx_data import require_plain_folder
from tasks.jobs.checkpoint.weights import mapped_network
from tasks.jobs.evaluation.heldout import open_documents

# GPT-2 as ONNX, which onnxruntime-genai's builder does not know: its own parts, put together in GPT-2's order.
#
# What differs from the networks that it builds: learnt positions are added to the embeddings and none are rotated,
# LayerNorm has biases, the feed-forward layer has no gate, one matrix gives queries, keys and values. When this is
# built and how it is proven is tasks/jobs/export.py. Imported by it when there is a GPT-2 to export, for the builder
# takes seconds.


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


MODEL = "model.onnx"
DATA = "model.onnx.data"
GPT2 = "GPT2LMHeadModel"
"""Built by tasks/jobs/exporting/graph.py."""
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"accuracy_level": 4},
    "int4": {"accuracy_level": 4, "algo_config": "k_quant_mixed", "block_size": 32},
}
"""Of the builder's quantiser. 4: activations are int8 too, which is what is fast on a CPU. `k_quant_mixed` keeps in int8 what
hurts most (the last matrix, and some layers). What it costs is in docs/export.md."""


def build(checkpoint: Path, output: Path, *, precision: str, context: int | None = None) -> None:
    """Write the ONNX model, its data, genai_config.json, the tokenizer, config.json and generation_config.json.

    `context` are the tokens that it declares, by default as many as config.json says. Raises ValueError for a checkpoint that
    cannot be exported; IntegrityError when the graph's data is not all beside it.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"the checkpoint {checkpoint} has no {name}: name a Hugging Face folder with tokenizer")
    if architecture(checkpoint) is None:
        raise ValueError(f"{checkpoint / 'config.json'} names no architecture: save the model with `save_pretrained`")
    require_positions(checkpoint, context)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, _with_room(checkpoint, context) as folder:
        if architecture(checkpoint) == GPT2:
            build_gpt2(folder, output, precision=precision, cache=cache, more=OPTIONS.get(precision, {}))
        else:
            # By onnxruntime-genai's own builder. Importing it takes seconds, reads HF_HUB_OFFLINE and changes sys.path.
            from onnxruntime_genai.models import builder

            messages = ["hf_token=false", *(f"{name}={value}" for name, value in OPTIONS.get(precision, {}).items())]
            options: dict[str, Any] = builder.parse_extra_options(
                "", str(folder), str(output), precision, "cpu", cache, messages
            )
            try:
                with _weights_mapped(builder):
                    builder.create_model("", str(folder), str(output), precision, "cpu", cache, **options)
            except NotImplementedError as error:
                raise ValueError(
                    f"the checkpoint's architecture {architecture(folder)} cannot be exported: onnxruntime-genai "
                    f"{genai.__version__} does not build it. Use one that it builds, such as LlamaForCausalLM."
                ) from error
    copy_settings(checkpoint, output)
    settle(checkpoint, output, context)
    forget_where_it_was_built(output / MODEL, genai.__version__)
    require_plain_folder(output)


@contextmanager
def _weights_mapped(builder: Any) -> Iterator[None]:
    """Have the builder see weights that are mapped into memory: it turns and writes them one by one, and none is kept.

    Only q, k and v, which it joins to one matrix, are copied before that. What is no plain checkpoint it loads itself.
    """
    kind, plain = builder.Model, builder.Model.load_weights

    def load(self: Any, path: str) -> Any:
        if self.quant_type is None and Path(path).is_dir():
            try:
                return mapped_network(Path(path))
            except ValueError as error:
                print(f"the weights are loaded as a whole: {error}", flush=True)
        return plain(self, path)

    kind.load_weights = load
    try:
        yield
    finally:
        kind.load_weights = plain


def architecture(checkpoint: Path) -> str | None:
    """The class that config.json names."""
    named = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    return named[0]


def copy_settings(checkpoint: Path, output: Path) -> None:
    """config.json, and how a completion ends: generation_config.json, by config.json when the checkpoint has none."""
    from transformers import AutoConfig, GenerationConfig

    shutil.copyfile(checkpoint / "config.json", output / "config.json")
    if (checkpoint / "generation_config.json").is_file():
        shutil.copyfile(checkpoint / "generation_config.json", output / "generation_config.json")
    else:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        GenerationConfig.from_model_config(config).to_json_file(output / "generation_config.json")


@contextmanager
def _with_room(checkpoint: Path, context: int | None) -> Iterator[Path]:
    """The checkpoint; where it declares fewer positions, a folder of its files whose config.json declares `context` of them: the
    builder writes a table of so many rotations.
    """
    if not context or context <= (declared_positions(checkpoint) or context):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for path in checkpoint.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}), encoding="utf-8")
        yield folder


def settle(checkpoint: Path, output: Path, context: int | None) -> None:
    """Write what the builder does not know: the tokens that the checkpoint's documents open with, and how many a model takes."""
    opening = open_documents(checkpoint, output)
    path = output / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if opening:
        settings["model"]["bos_token_id"] = opening[0]  # where config.json names none, the builder writes 1
    if context:
        settings["model"]["context_length"] = settings["search"]["max_length"] = context
    path.write_text(json.dumps(settings, indent=4), encoding="utf-8")


def forget_where_it_was_built(path: Path, producer: str) -> None:
    """The builder stamps the git commit of whatever repository its package lies in (ours, for a .venv inside it)."""
    model = onnx.load(path, load_external_data=False)
    model.producer_version = producer
    path.write_bytes(model.SerializeToString(deterministic=True))
