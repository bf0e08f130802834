"""Settings of training: what is trained (`training`), how it is run (`execution`), and how often it is saved.

`training` is in the stage's key: everything in it changes the model. `execution` changes how fast and how safely the same model
is reached: parallelism, recomputation, limits, what is recorded. The whole tree is tasks/config/flows.py. See docs/training.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tasks.config.base import Fraction, Name, Positive, Settings

EngineName = Literal["torch", "deepspeed", "megatron"]
Reaction = Literal["stop", "skip", "rollback"]
"""To a step that is no good: stop the job; leave the step's gradient out; go back one checkpoint and leave the batches out."""


class NetworkConfig(Settings):
    """A causal language model, built with random weights."""

    architecture: Literal["llama", "gpt2"] = "llama"
    """Family of the network: `llama` (RMSNorm, rotary positions, SwiGLU) or `gpt2` (LayerNorm, learned positions, GELU)."""
    layers: Positive = 4
    """Transformer blocks."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    heads: Positive = 4
    """Query heads of the attention."""
    kv_heads: Positive = 4
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    intermediate_size: Positive = 352
    """Width of the feed-forward layer."""
    tie_embeddings: bool = True
    """Whether input and output embeddings are one matrix."""

    @model_validator(mode="after")
    def _heads_divide(self) -> NetworkConfig:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            text = f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}"
            raise ValueError(f"{text}, and heads a multiple of kv_heads {self.kv_heads}")
        if self.architecture == "gpt2" and self.kv_heads != self.heads:
            raise ValueError(f"gpt2 has as many kv_heads as heads: {self.kv_heads} is not {self.heads}")
        return self


class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021) beside a base model's frozen weights; merged into them at the end."""

    rank: Positive | None = None
    """Rank of the adapters; empty: all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """Scale: the adapters' product counts alpha / rank."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the adapters' input that is dropped in training."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, as `q_proj`; empty: all but the output layer."""


class SafetyConfig(Settings):
    """What happens when a step is no good. It decides which batches the model saw, so it is in the key."""

    not_finite: Reaction = "stop"
    """When the loss or the gradient's norm is NaN or infinite: `stop`, `skip` or `rollback`."""
    spike: Reaction = "stop"
    """When the loss spikes, where `spike_factor` is given."""
    spike_factor: float | None = Field(None, gt=1.0)
    """A loss above this multiple of the median of the last `spike_window` steps is a spike; empty: none is."""
    spike_window: Positive = 20
    """Steps whose median a loss is compared with; before there are so many nothing is a spike."""
    at_most: Positive = 3
    """Reactions of one run; one more stops it."""
    repeat_every_steps: Positive | None = None
    """Steps between two probes for silent data corruption: a step's gradient twice, compared bit by bit; empty: never."""


class TrainingConfig(Settings):
    """One training run. Everything in it changes the model, so everything in it is in the stage's key."""

    model: Name = "model"
    """Name of the checkpoint and of the registered model."""
    objective: Literal["pretrain", "sft"] = Field("pretrain", exclude_if=lambda objective: objective == "pretrain")
    """What is learned: `pretrain`, every token of a stream of text; `sft`, the assistant's answers in conversations alone."""
    engine: EngineName = "torch"
    """What trains: `torch`, our own loop; `deepspeed`, the same loop with ZeRO; `megatron`, Megatron-LM's pretrain_gpt.py."""
    network: NetworkConfig = NetworkConfig()
    base: str = ""
    """Model to start from, `checkpoint/NAME[@VERSION]`; its network and tokenizer are used. Empty: `network`, random weights."""
    lora: LoraConfig = LoraConfig()
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of matrix products and activations; weights and optimizer state are float32."""
    sequence_length: Positive = 256
    """Tokens a sample; of `sft`, those of the longest conversation that is learned: longer ones are left out, and counted."""
    packing: bool = Field(False, exclude_if=lambda packing: not packing)
    """Of `sft`, whether a sample is as many whole conversations as fit, which do not see each other; else it is one."""
    mask_documents: bool = False
    """Whether attention and positions end at a document's end; else a sample is one text."""
    mixture: dict[str, float] = Field(default={})
    """Shares by which samples are drawn of several tokens artifacts, `NAME` or `tokens/NAME@VERSION`; their sum counts as 1.

    The run's own tokens are among them, by the name of its dataset. Empty: only they are trained on.
    """
    global_batch_size: Positive = 8
    """Samples a step, over all ranks."""
    micro_batch_size: Positive = 4
    """Samples that a rank computes at once; the rest of its share is accumulated."""
    steps: Positive = 800
    """Optimizer steps."""
    learning_rate: float = Field(4e-3, gt=0)
    """Peak of the schedule."""
    min_learning_rate_ratio: Fraction = 0.1
    """Share of the peak at which the schedule ends."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: half a cosine down, or stable and then linearly down (warmup-stable-decay)."""
    decay_share: float = Field(0.2, gt=0.0, le=1.0)
    """Last part of the steps in which `wsd` goes down."""
    warmup_steps: int = Field(40, ge=0)
    """Steps in which the learning rate rises to its peak."""
    weight_decay: float = Field(0.1, ge=0)
    """Of matrices, by AdamW; norms are left alone."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the mean of the gradient."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """AdamW's decay of the mean of its square."""
    gradient_clip: float = Field(1.0, gt=0)
    """Largest L2 norm of the gradient over all parameters."""
    seed: int = Field(1234, ge=0)
    """Of the weights' initialisation and the order of samples."""
    safety: SafetyConfig = SafetyConfig()

    @model_validator(mode="after")
    def _conversations_stand_alone(self) -> TrainingConfig:
        if self.packing and self.objective != "sft":
            raise ValueError("training.packing is for sft: samples of pretrain are full as they are")
        if self.objective == "sft" and self.mask_documents:
            raise ValueError(
                "training.mask_documents is for pretrain: with sft each conversation is a sample of its own"
            )
        return self

    @model_validator(mode="after")
    def _mixture_is_one(self) -> TrainingConfig:
        if len(self.mixture) == 1:
            raise ValueError(
                f"training.mixture has one part, {next(iter(self.mixture))}: leave it empty, or add another"
            )
        for name, share in self.mixture.items():
            if not 0 < share < float("inf"):
                raise ValueError(
                    f"training.mixture.{name} {share:g} is no share: give a number above 0, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainingConfig:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be fewer than steps {self.steps}")
        if self.lora.rank and not self.base:
            raise ValueError(f"lora.rank {self.lora.rank} needs a base model: set training.base to checkpoint/NAME")
        return self


class CheckpointConfig(Settings):
    """How often training is saved, and what is kept."""

    every_steps: Positive | None = None
    """Steps between checkpoints; empty: the plan chooses (Young and Daly), and training corrects it by what saving takes."""
    keep: int = Field(2, ge=2)
    """Newest checkpoints that are kept. At least two: the newest may be in the process of being written."""
    keep_every: Positive | None = None
    """Checkpoints of every so many steps are kept for good; empty: none."""


class LimitsConfig(Settings):
    """When a run is stopped although it is not done: with a checkpoint to resume from."""

    max_hours: float | None = Field(None, gt=0)
    """Hours that the run holds its machines, over all submissions; empty: no limit."""
    max_cost: float | None = Field(None, gt=0)
    """Money that this run may cost, in the currency of `cost_per_hour`; empty: no limit."""
    cost_per_hour: float = Field(0.0, ge=0)
    """What all its machines cost an hour."""

    @model_validator(mode="after")
    def _cost_is_known(self) -> LimitsConfig:
        if self.max_cost is not None and not self.cost_per_hour:
            raise ValueError(
                f"limits.max_cost {self.max_cost:g} needs limits.cost_per_hour, what all machines cost an hour"
            )
        return self


class NoticesConfig(Settings):
    """Whether training asks Azure if its machine is about to be taken (Scheduled Events): then it saves and ends in time."""

    ask: bool = False
    """Whether every machine asks; of use on Spot and low-priority machines."""
    address: str = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
    """Where it asks. Only machines on Azure have it."""
    every_seconds: float = Field(1.0, gt=0)
    """Time between two questions."""


class DeepspeedConfig(Settings):
    """What the engine `deepspeed` shards and offloads."""

    zero_stage: Literal[1, 2, 3] = 2
    """What is divided over ranks: 1 optimizer state, 2 gradients too, 3 weights too."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state, and of stage 3 the weights, lie."""
    nvme_path: str = ""
    """Folder on the machine's NVMe disk for `offload: nvme`."""


class MegatronConfig(Settings):
    """Where Megatron-LM is, and what it divides."""

    checkout: str = ""
    """Folder of Megatron-LM on the machines, as `/opt/megatron-lm`; needed by the engine `megatron`."""
    flavour: Literal["megatron-lm", "megatron-deepspeed"] = "megatron-lm"
    """NVIDIA's Megatron-LM, or Microsoft's Megatron-DeepSpeed (pipeline and tensor parallel with ZeRO)."""
    transformer_impl: Literal["transformer_engine", "local"] = Field(
        "transformer_engine", exclude_if=lambda named: named == "transformer_engine"
    )
    """What Megatron-LM's layers are built from: NVIDIA's Transformer Engine, which the machines must have, or its own modules."""
    sequence_parallel: bool = False
    """Whether norms and dropout are divided along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Whether the optimizer's state is divided over data-parallel ranks."""
    converter: tuple[str, ...] = ()
    """Command that writes a Hugging Face folder `{output}` from Megatron's `{checkpoint}`, with the network's configuration in
    `{config}`; `{python}` is the job's Python. Empty: Megatron-Bridge, which reads Megatron-LM's llama networks."""
    arguments: tuple[str, ...] = ()
    """More arguments of pretrain_gpt.py, as they are."""


class ExecutionConfig(Settings):
    """How the same model is reached: nothing in it is in a key, and a checkpoint can be resumed under another one."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Weights whole on every rank (`ddp`), or divided over all of them (`fsdp`, FSDP2)."""
    tensor_parallel: Positive = 1
    """Ranks that share each matrix; of the engines `torch` (networks with a plan) and `megatron`."""
    pipeline_parallel: Positive = 1
    """Ranks that share the layers; of the engine `megatron`."""
    context_parallel: Positive = 1
    """Ranks that share each sequence; of the engine `megatron`."""
    compile: bool = False
    """Whether torch.compile makes kernels of the network first: minutes at the start, faster steps on GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass: `none`; `selective`, all but the results of matrix products and
    of the attention; `full`, all within a block."""
    prefetch_steps: Positive = 2
    """Steps whose samples are read ahead, while others are computed."""
    cache_gib: float | None = Field(None, gt=0)
    """Room on each machine's own disk for tokens that lie on a shared one or in a store, brought while training runs; empty: none
    is kept, and tokens in a store are brought whole before training."""
    max_crossing_share: Fraction = 0.01
    """Share of what a corpus of a mixture holds out that may nearly repeat what training reads of another one, in documents; more
    ends the run before its first step. With 1 nobody looks."""
    heldout_every_steps: Positive | None = None
    """Steps between two measurements on held-out text; empty: none."""
    heldout_samples: Positive = 16
    """Held-out samples of such a measurement."""
    profile_from: Positive | None = None
    """First step that torch's profiler records, into `profile/` of the job's folder; empty: none is."""
    profile_steps: Positive = 3
    """Steps that it records."""
    local_every_steps: Positive | None = None
    """Steps between checkpoints on the machine's own disk, beside those in the job folder; empty: none."""
    straggler_factor: float = Field(1.5, gt=1.0)
    """A rank whose own part of a step takes so many times the middle rank's, over 20 steps, is named as a straggler."""
    limits: LimitsConfig = LimitsConfig()
    notices: NoticesConfig = NoticesConfig()
    deepspeed: DeepspeedConfig = DeepspeedConfig()
    megatron: MegatronConfig = MegatronConfig()

    @property
    def ranks_a_copy(self) -> int:
        """Ranks that share one copy of the network's work: they read the same samples."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @model_validator(mode="after")
    def _offload_has_a_place(self) -> ExecutionConfig:
        if self.deepspeed.offload == "nvme" and not self.deepspeed.nvme_path:
            raise ValueError("deepspeed.offload nvme needs deepspeed.nvme_path, a folder on the machines' NVMe disk")
        if self.deepspeed.offload == "nvme" and self.deepspeed.zero_stage != 3:
            raise ValueError(f"deepspeed.offload nvme needs deepspeed.zero_stage 3, not {self.deepspeed.zero_stage}")
        return self
