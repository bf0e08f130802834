"""How big a network is: parameters, memory, checkpoint bytes, floating-point operations.

Pure arithmetic on the shape of a Llama-family network or a GPT-2. Whether it fits is judged by the stage (tasks/plan.py). Sizes
are in bytes, not GiB. See docs/planning.md.
"""

from __future__ import annotations

from tasks.config.training import NetworkConfig

# How long a training step takes, from what the qualification measured.
#
# Judging the time is the stage's (tasks/plan.py). Nothing is overlapped here, so an engine that overlaps is faster than
# this says. See docs/planning.md.


DEFAULT_EFFICIENCY = 0.5
"""Share of the square-matmul rate that a whole step reaches, by Megatron's count of operations.

Norms, softmax, the optimizer and small matrices cost time and count little. Measured with a plain loop (Llama, fp32,
AdamW, one thread a rank, both cores busy) against 512 x 512 matmuls in the same process: median 0.56 at 0.9 M and 0.52
at 1.1 M parameters, 0.6 to 0.7 at 5 M and 16 M. Published H100 runs of Megatron-Core reach 0.41 to 0.49 of the peak."""


def compute_seconds(flops: float, gflops: float, *, efficiency: float = DEFAULT_EFFICIENCY) -> float:
    """Time of `flops` operations on one rank whose matmul rate is `gflops` (10^9 operations a second)."""
    if gflops <= 0 or not 0 < efficiency <= 1:
        raise ValueError(
            f"a rate of {gflops} GFLOP/s at efficiency {efficiency}: need a rate above 0 and 0 < efficiency <= 1"
        )
    return flops / (gflops * 1e9 * efficiency)


def allreduce_seconds(message_bytes: float, ranks: int, *, bus_gigabytes_per_second: float) -> float:
    """Time of one ring all-reduce: 2 (n - 1) / n x bytes / bus bandwidth; 0 for one rank.

    Inverts the definition of bus bandwidth in nccl-tests (doc/PERFORMANCE.md): busbw = bytes / time x 2 (n - 1) / n.
    """
    if ranks == 1:
        return 0.0
    if bus_gigabytes_per_second <= 0:
        raise ValueError(f"a bus bandwidth of {bus_gigabytes_per_second} GB/s over {ranks} ranks: need one above 0")
    return 2 * (ranks - 1) / ranks * message_bytes / (bus_gigabytes_per_second * 1e9)


def step_seconds(
    flops: float,
    gradient_bytes: float,
    *,
    ranks: int,
    gflops_per_rank: float,
    bus_gigabytes_per_second: float,
    efficiency: float = DEFAULT_EFFICIENCY,
) -> float:
    """One optimizer step: the slowest rank's share of the step's `flops`, then one all-reduce of the gradients.

    `flops` are those of the whole global batch; `gflops_per_rank` is the matmul rate of the slowest rank, for which
    all others wait.
    """
    computing = compute_seconds(flops / ranks, gflops_per_rank, efficiency=efficiency)
    return computing + allreduce_seconds(gradient_bytes, ranks, bus_gigabytes_per_second=bus_gigabytes_per_second)


FLOAT32_BYTES = 4
TRAINING_BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and two Adam moments, whole on every rank: Megatron-LM's README, fp32, no distributed
optimizer. Assumes DDP with `gradient_as_bucket_view=True`; else its buckets are a second copy of the gradients (20)."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""float32 weight and two Adam moments; gradients are not saved."""
CHECKPOINT_OVERHEAD_BYTES = 1_000_000
"""safetensors headers, the state of the random generators, manifest and receipts."""
LOGIT_COPIES = 4
"""Of [tokens, vocab_size] in float32 at the peak (measured): logits, log-softmax, and the gradient of each."""


def parameter_count(network: NetworkConfig, vocab_size: int, *, positions: int = 0) -> int:
    """Exact parameters of transformers' LlamaForCausalLM (no biases, RMSNorm weights counted) or GPT2LMHeadModel of this shape.

    `positions` are those that GPT-2 learns, the sequence length; a Llama has none.
    """
    hidden, gpt2 = network.hidden_size, network.architecture == "gpt2"
    norms = (network.layers * 2 + 1) * hidden * (2 if gpt2 else 1)
    biases = network.layers * (5 * hidden + network.intermediate_size) if gpt2 else 0
    embeddings = vocab_size * hidden * (1 if network.tie_embeddings else 2) + (positions * hidden if gpt2 else 0)
    return network.layers * _layer_matrices(network) + biases + norms + embeddings


def adapter_parameters(network: NetworkConfig, rank: int, targets: tuple[str, ...] = ()) -> int:
    """Numbers of LoRA's adapters, rank x (inputs + outputs) a matrix; of a Llama's layers, or of those of GPT-2."""
    hidden, wide, kv = network.hidden_size, network.intermediate_size, _kv_size(network)
    if network.architecture == "gpt2":
        sides = {"c_attn": 4 * hidden, "c_proj": 3 * hidden + wide, "c_fc": hidden + wide}
    else:
        attention = {"q_proj": 2 * hidden, "k_proj": hidden + kv, "v_proj": hidden + kv, "o_proj": 2 * hidden}
        sides = {**attention, **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + wide)}
    return network.layers * rank * sum(size for name, size in sides.items() if not targets or name in targets)


def training_memory_bytes(parameters: int, *, frozen: int = 0) -> int:
    """Weights, gradients and optimizer state on one rank of DDP in float32; activations come on top.

    `frozen` are weights beside the trained ones, that have neither gradient nor optimizer state.
    """
    return TRAINING_BYTES_PER_PARAMETER * parameters + FLOAT32_BYTES * frozen


def activation_bytes(network: NetworkConfig, vocab_size: int, *, sequence_length: int, micro_batch_size: int) -> int:
    """Estimate of what forward keeps for backward, and the logits, on one rank in float32 without recomputation.

    Counted operation by operation as Korthikanti et al. 2022 (section 4.1) do, for a Llama layer as transformers builds
    it and attention that keeps no [s, s] matrix. Elements a token and layer: two RMSNorms, each with its input, what it
    normalised and its output, 6h; queries and attention output 2h; keys and values 2kv; SwiGLU 4f (gate, silu of the
    gate, up, their product). Of GPT-2: two LayerNorms, each with its input and output, 4h; queries, keys, values and
    attention output 4h; GELU and its input 2f.
    """
    hidden, kv = network.hidden_size, _kv_size(network)
    gpt2 = network.architecture == "gpt2"
    layer = 8 * hidden + (2 if gpt2 else 4) * network.intermediate_size + (0 if gpt2 else 2 * kv)
    around = (2 if gpt2 else 3) * hidden + LOGIT_COPIES * vocab_size
    return FLOAT32_BYTES * micro_batch_size * sequence_length * (network.layers * layer + around)


def checkpoint_bytes(parameters: int) -> int:
    """Size of one resumable checkpoint."""
    return CHECKPOINT_BYTES_PER_PARAMETER * parameters + CHECKPOINT_OVERHEAD_BYTES


def flops_per_token_6n(parameters: int) -> int:
    """6N: two operations a parameter forward, four backward (Kaplan et al. 2020, section 2.1), no attention."""
    return 6 * parameters


def flops_per_token_megatron(network: NetworkConfig, vocab_size: int, *, sequence_length: int) -> int:
    """Megatron-LM's current convention (training.py, num_floating_point_operations).

    6 x (matrices of the layers + output projection) + 6 q L s: causal attention counted as half of the full square. The
    output projection counts also when its matrix is tied; looking up the input embedding costs nothing.
    """
    matrices = network.layers * _layer_matrices(network) + network.hidden_size * vocab_size
    return 6 * matrices + 6 * network.hidden_size * network.layers * sequence_length


def _layer_matrices(network: NetworkConfig) -> int:
    """Parameters of one layer's matrices: query, output; key, value; gate, up, down, of GPT-2 up and down only."""
    hidden, feeding = network.hidden_size, 2 if network.architecture == "gpt2" else 3
    return 2 * hidden * hidden + 2 * hidden * _kv_size(network) + feeding * hidden * network.intermediate_size


def _kv_size(network: NetworkConfig) -> int:
    return network.kv_heads * (network.hidden_size // network.heads)
