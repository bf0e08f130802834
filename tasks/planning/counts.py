"""What a network is made of: parameters by part, of a token, of one GPU; and the operations of a step by each convention.

Pure. How many bytes that takes is memory.py, how long it takes steps.py. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tasks.planning.case import Network, Recompute
from tasks.planning.prediction import Division, Flops

MOST_STAGES = 65_536
"""Bound of the work that a mistake can cause."""
FFN_MULTIPLE = 256
"""Llama rounds 8/3 x hidden up to this (`multiple_of` of its published params.json): 11,008 of 4,096, 13,824 of 5,120."""


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. `layers` of them are in the parts up to `biases`; the others stand at the two ends of the network."""

    attention: float = 0
    """Matrices of queries, keys, values and output."""
    feed_forward: float = 0
    """Matrices of the dense layers and of shared experts."""
    experts: float = 0
    """Matrices of the experts that a router chooses between."""
    router: float = 0
    norms: float = 0
    biases: float = 0
    embedding: float = 0
    positions: float = 0
    output: float = 0
    """Of its own: 0 where it is the input embedding on the same GPU."""
    final_norm: float = 0

    @property
    def total(self) -> float:
        return float(self.layers + self.embedding + self.positions + self.output + self.final_norm)

    @property
    def layers(self) -> float:
        """What all but the two ends hold."""
        return self.attention + self.feed_forward + self.experts + self.router + self.norms + self.biases

    @property
    def dense(self) -> float:
        """All but the experts: what is divided over all ranks of data parallelism."""
        return self.total - self.experts


def head_size(network: Network) -> int:
    """Elements of one attention head."""
    return network.head_size or network.hidden // network.heads


def query_size(network: Network) -> int:
    """Elements of a token's queries."""
    return network.heads * head_size(network)


def kv_heads(network: Network) -> int:
    return network.kv_heads or network.heads


def kv_size(network: Network) -> int:
    """Elements of a token's keys; values are as many."""
    return kv_heads(network) * head_size(network)


def ffn_size(network: Network) -> int:
    """Width of a dense layer's feed-forward part."""
    if network.ffn:
        return network.ffn
    if not network.gated:
        return 4 * network.hidden
    return -(-8 * network.hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def expert_ffn_size(network: Network) -> int:
    """Width of one expert; 0 without experts."""
    return (network.experts.ffn or ffn_size(network)) if network.experts else 0


def has_biases(network: Network) -> bool:
    """Whether matrices and norms have biases: GPT-2 and its kind do, Llama and its kind do not."""
    return not network.gated if network.biases is None else network.biases


def has_positions(network: Network) -> bool:
    """Whether positions are learned, a vector each."""
    return not network.gated if network.learned_positions is None else network.learned_positions


def ffn_matrices(network: Network) -> int:
    return 3 if network.gated else 2


def has_experts(network: Network, layer: int) -> bool:
    """Whether the layer of this number, counted from 0, has experts: one in `every`, the first of each group (Megatron-LM)."""
    return network.experts is not None and layer % network.experts.every == 0


def layer_parameters(network: Network, *, experts: bool, tp: int = 1, ep: int = 1) -> Parameters:
    """One layer's, of one GPU where it is divided by `tp` and `ep`. Norms and the biases after a row-parallel matrix are whole.

    Keys and values are divided over no more GPUs than there are key heads, as Megatron-LM does. Checked against logs of
    Megatron-LM: tests/unit/tasks/planning/test_counts.py.
    """
    hidden, query = network.hidden, query_size(network) / tp
    keys = kv_size(network) / min(tp, kv_heads(network))
    biases, mixture = has_biases(network), network.experts if experts else None
    wide = (mixture.shared * expert_ffn_size(network) if mixture else ffn_size(network)) / tp
    up = ffn_matrices(network) - 1
    biases_of = (query + 2 * keys + hidden) + (up * wide + hidden if wide else 0)
    return Parameters(
        attention=2 * hidden * query + 2 * hidden * keys,
        feed_forward=(up + 1) * hidden * wide,
        experts=(up + 1) * hidden * expert_ffn_size(network) * mixture.count / ep / tp if mixture else 0,
        router=hidden * mixture.count if mixture else 0,
        norms=2 * hidden * (2 if biases else 1),
        biases=biases_of if biases else 0,
    )


def parameters(network: Network, sequence: int) -> Parameters:
    """All of the network's. `sequence` counts where positions are learned."""
    return gpu_parameters(network, Division(), sequence=sequence)


def parameter_count(network: Network, sequence: int) -> int:
    """All of the network's, as a whole number: those of transformers' LlamaForCausalLM or GPT2LMHeadModel of this shape."""
    return round(parameters(network, sequence).total)


def adapter_parameters(network: Network, rank: int, targets: tuple[str, ...] = ()) -> int:
    """Numbers of LoRA's adapters, rank x (inputs + outputs) a matrix; of a Llama's layers, or of those of GPT-2."""
    hidden, wide, keys = network.hidden, ffn_size(network), kv_size(network)
    if network.gated:
        attention = {"q_proj": 2 * hidden, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": 2 * hidden}
        sides = {**attention, **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + wide)}
    else:
        sides = {"c_attn": 4 * hidden, "c_proj": 3 * hidden + wide, "c_fc": hidden + wide}
    return network.layers * rank * sum(size for name, size in sides.items() if not targets or name in targets)


def active_parameters(network: Network, sequence: int) -> float:
    """Those that a token meets: of the experts, the `active` ones and the shared ones."""
    whole = parameters(network, sequence)
    if network.experts is None:
        return whole.total
    return whole.total - whole.experts * (1 - network.experts.active / network.experts.count)


@lru_cache(maxsize=1024)
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage. What does not divide: the first and the last hold one less where that makes it even.

    So BLOOM's 70 over 12 stages and Llama 3's 126 over 16. Else stages in the middle hold one more, of those the later ones.
    """
    if layers < pp:
        raise ValueError(f"layers {layers} over pp {pp} stages: a stage needs at least one; lower pp")
    if pp > MOST_STAGES:
        raise ValueError(f"pp {pp}: no training has more than {MOST_STAGES} pipeline stages; lower pp")
    each, over = divmod(layers, pp)
    if over == 0:
        return (each,) * pp
    if (layers + 2) % pp == 0:
        return (each, *[each + 1] * (pp - 2), each)
    favoured = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == 0, -stage))[:over]
    return tuple(each + (stage in favoured) for stage in range(pp))


def expert_layers(network: Network, division: Division) -> tuple[int, ...]:
    """Layers with experts of each pipeline stage; interleaving hardly changes how many there are."""
    numbers = stage_layers(network.layers, division.pp)
    if network.experts is None:
        return (0,) * division.pp
    before, every = 0, network.experts.every
    results = []
    for number in numbers:
        results.append(-(-(before + number) // every) - -(-before // every))
        before += number
    return tuple(results)


def gpu_parameters(network: Network, division: Division, *, sequence: int, stage: int = 0) -> Parameters:
    """Those of one GPU of a pipeline stage, whole: before ZeRO divides them over data parallelism.

    The first stage holds the embedding, the last the output, divided by tp; a tied one is on both of several stages.
    Megatron-DeepSpeed ties the module and not the matrix: there the last stage holds the positions as well.
    """
    if not 0 <= stage < division.pp:
        raise ValueError(f"stage {stage} of pp {division.pp}: stages are counted from 0")
    first, last = stage == 0, stage == division.pp - 1
    with_experts = expert_layers(network, division)[stage]
    dense = stage_layers(network.layers, division.pp)[stage] - with_experts
    plain = layer_parameters(network, experts=False, tp=division.tp)
    sparse = layer_parameters(network, experts=True, tp=division.tp, ep=division.ep) if with_experts else plain
    matrix = network.vocab * network.hidden / division.tp
    positions = first or (last and network.tied and division.counted.ties_positions)
    return Parameters(
        attention=dense * plain.attention + with_experts * sparse.attention,
        feed_forward=dense * plain.feed_forward + with_experts * sparse.feed_forward,
        experts=with_experts * sparse.experts,
        router=with_experts * sparse.router,
        norms=dense * plain.norms + with_experts * sparse.norms,
        biases=dense * plain.biases + with_experts * sparse.biases,
        embedding=matrix if first else 0,
        positions=sequence * network.hidden if positions and has_positions(network) else 0,
        output=matrix if last and not (first and network.tied) else 0,
        final_norm=network.hidden * (2 if has_biases(network) else 1) if last else 0,
    )


def matrix_flops_per_token(network: Network) -> tuple[float, float]:
    """Forward operations of one token in matrices: of the layers, and of the output. Two a parameter that it meets."""
    whole, mixture = parameters(network, 1), network.experts
    experts = whole.experts * mixture.active / mixture.count if mixture else 0.0
    layers = whole.attention + whole.feed_forward + whole.router + experts
    return 2.0 * layers, 2.0 * network.hidden * network.vocab


def attention_flops_per_token(network: Network, sequence: int) -> float:
    """Forward operations of one token between queries, keys and values over the whole square: two matmuls of 2 s q a layer."""
    return 4.0 * sequence * query_size(network) * network.layers


def model_flops_per_token(network: Network, sequence: int) -> int:
    """Megatron-LM's current convention (training.py, num_floating_point_operations): forward and backward of one token.

    Causal attention counts as half of the full square, the output projection also when its matrix is tied; looking up the input
    embedding costs nothing.
    """
    layers, output = matrix_flops_per_token(network)
    return round(3 * (layers + output + attention_flops_per_token(network, sequence) / 2))


def flops(
    network: Network, sequence: int, global_batch: int, *, recompute: Recompute = "none", flash_attention: bool = True
) -> Flops:
    """Operations of one step over all GPUs by each convention. A backward pass is twice its forward pass.

    Flash attention counts half the square (causal) and in the backward pass 5 matmuls for 2 (it computes the scores again: Dao
    2023, section 3.2). Selective recomputation runs attention's forward once more, full recomputation all of the layers' forward.
    """
    tokens = float(sequence) * global_batch
    layers, output = matrix_flops_per_token(network)
    square = attention_flops_per_token(network, sequence)
    again = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[recompute]
    attention = square / 2 * (3.5 + again[1]) if flash_attention else square * (3 + again[1])
    hardware = tokens * (layers * (3 + again[0]) + attention + 3 * output)
    return Flops(
        hardware=hardware,
        model=tokens * model_flops_per_token(network, sequence),
        published_96=flops_96(network, sequence, global_batch) if is_gpt(network) else hardware,
        six_n=6 * active_parameters(network, sequence) * tokens,
    )


def is_gpt(network: Network) -> bool:
    """Whether the formulas that are written in h alone hold: 12 h^2 of matrices a layer."""
    plain = not network.gated and network.experts is None and kv_heads(network) == network.heads
    return plain and ffn_size(network) == 4 * network.hidden and query_size(network) == network.hidden


def flops_96(network: Network, sequence: int, global_batch: int) -> float:
    """96 B s L h^2 (1 + s/6h + V/16Lh): with full recomputation, the whole square of attention. Narayanan et al. 2021, eq. 3."""
    layers, hidden, vocab = network.layers, network.hidden, network.vocab
    bracket = 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96.0 * global_batch * sequence * layers * hidden**2 * bracket


def flops_72(network: Network, sequence: int, global_batch: int, *, selective: bool = False) -> float:
    """72 B s L h^2 (1 + s/6h + V/12Lh), model FLOPs; selective: s/3h, what Korthikanti et al. 2022 count as hardware FLOPs."""
    layers, hidden, vocab = network.layers, network.hidden, network.vocab
    bracket = 1 + sequence / ((3 if selective else 6) * hidden) + vocab / (12 * layers * hidden)
    return 72.0 * global_batch * sequence * layers * hidden**2 * bracket
