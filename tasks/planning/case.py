"""What a plan is asked for: a network, a cluster, how it is divided, a batch. The words of `headway plan --case FILE.yaml`.

Pure: reading the file is deployments/cli/planning/plan.py; what is made of a case, predict.py. What is left out of `parallel` is
searched. Every mistake of a case alone is found here, by name and value; what needs the machine as well, in predict.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.config.training import EngineName, NetworkConfig

Count = Annotated[int, Field(ge=1, le=10**12)]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Goal = Literal["fastest", "cheapest", "smallest"]


class Part(BaseModel):
    """Base of a case's sections: a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _a_truth_is_no_number(cls, given: Any) -> Any:
        """Python takes True for 1."""
        for key, value in given.items() if isinstance(given, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and _numeric(cls.model_fields[key].annotation):
                raise ValueError(f"{key} {value} is no number")
        return given


def _numeric(annotation: Any) -> bool:
    """Of an annotation or of what is inside it: int | None, Literal[0, 1]."""
    inner = [part for part in get_args(annotation) if part is not None]
    return annotation in (int, float) or any(isinstance(part, int) or _numeric(part) for part in inner)


class Experts(Part):
    """A mixture of experts in place of a layer's feed-forward matrices."""

    count: Count
    active: Count
    """Experts that a token goes through, the router's top k; shared ones come on top."""
    ffn: int | None = Field(None, ge=1)
    """Width of one expert; empty: the network's."""
    shared: int = Field(0, ge=0)
    """Experts that every token goes through."""
    every: Count = 1
    """One layer in so many has experts; the others are dense."""

    @model_validator(mode="after")
    def _not_more_than_there_are(self) -> Experts:
        if self.active > self.count:
            raise ValueError(f"active {self.active} is more than count {self.count}")
        return self


class Network(Part):
    """A decoder: layers of attention and feed-forward matrices, and an output over the vocabulary."""

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: int | None = Field(None, ge=1)
    """Empty: as many as heads."""
    head_size: int | None = Field(None, ge=1)
    """Empty: hidden / heads."""
    ffn: int | None = Field(None, ge=1)
    """Empty: 4 x hidden; gated, 8/3 x hidden, so that the matrices are as large."""
    gated: bool = False
    """Three feed-forward matrices (SwiGLU) and not two."""
    vocab: Count
    """As trained, padding included."""
    tied: bool = True
    """Whether the output matrix is the input embedding."""
    learned_positions: bool | None = None
    """Empty: those that are not gated have them, as GPT-2 and GPT-3 do."""
    biases: bool | None = None
    """Empty: those that are not gated have them."""
    experts: Experts | None = None

    @model_validator(mode="after")
    def _divides(self) -> Network:
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} does not divide by heads {self.heads}: give head_size, or other heads"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} does not divide by kv_heads {self.kv_heads}")
        return self

    @classmethod
    def of_config(cls, config: NetworkConfig, vocab_size: int) -> Network:
        """The network of a lifecycle's configuration, with a vocabulary of this size."""
        gpt2 = config.architecture == "gpt2"
        return cls(
            layers=config.layers,
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            ffn=config.intermediate_size,
            gated=not gpt2,
            vocab=vocab_size,
            tied=config.tie_embeddings,
            learned_positions=gpt2,
            biases=gpt2,
        )


class ClusterOfCase(Part):
    """Which machines and how many of them: a size of Azure, or a GPU by its name with a generic machine of eight."""

    sku: str = ""
    gpu: str = ""
    nodes: int | None = Field(None, ge=1, le=10**7)
    gpus: int | None = Field(None, ge=1, le=10**8)
    spot: bool = False

    @model_validator(mode="after")
    def _one_of_each(self) -> ClusterOfCase:
        if bool(self.sku) == bool(self.gpu):
            raise ValueError("give sku, as `headway hardware` lists them, or gpu, as A100-80GB, and not both")
        if self.nodes is not None and self.gpus is not None:
            raise ValueError(f"nodes {self.nodes} and gpus {self.gpus} are given: give one of the two")
        return self


class Parallel(Part):
    """How a training is divided; what is empty is searched, or follows from the number of GPUs."""

    tp: int | None = Field(None, ge=1)
    pp: int | None = Field(None, ge=1)
    virtual: int | None = Field(None, ge=1)
    """Pieces of the network that a pipeline stage holds (interleaving); 1 is none."""
    dp: int | None = Field(None, ge=1)
    """Copies of the network that see different data, those that share its state by ZeRO included."""
    cp: int | None = Field(None, ge=1)
    ep: int | None = Field(None, ge=1)
    """Within the dp x cp ranks: how many share the experts of a layer."""
    zero: Literal[0, 1, 2, 3] | None = None
    """0: state is whole; 1: optimizer state divided over dp (Megatron's distributed optimizer); 2: gradients too; 3: weights too
    (FSDP)."""
    offload: Offload | None = None
    """Where optimizer state lies, and with zero 3 the weights."""
    sequence_parallel: bool | None = None
    """Norms and dropout divided over tp too; empty: with tp over 1, but for engine deepspeed."""


class BatchOfCase(Part):
    """Samples of `sequence` tokens."""

    micro: int | None = Field(None, ge=1)
    """Of one rank at a time; empty: searched."""
    global_: Count = Field(alias="global")
    """Of an optimizer step over all ranks."""


class Case(Part):
    """One training to plan."""

    name: str = ""
    network: Network
    sequence: Count
    cluster: ClusterOfCase
    parallel: Parallel = Parallel()
    batch: BatchOfCase
    precision: Precision = "bf16"
    recompute: Recompute | None = None
    """What is computed again in the backward pass and not kept; empty: searched."""
    flash_attention: bool = True
    """Whether no sequence x sequence matrix is kept or moved."""
    tokens: int | None = Field(None, ge=1)
    """To train on: gives days and cost; empty: a step is all that is planned."""
    engine: EngineName = "megatron"
    goal: Goal = "fastest"
    max_days: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def tokens_a_step(self) -> int:
        return self.batch.global_ * self.sequence
