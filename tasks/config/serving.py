"""What a checkpoint becomes, and how it is served, as settings: the export, and the endpoint with its rollout.

The programs are tasks/jobs/export.py and tasks/jobs/serve.py; who starts them, tasks/endpoints. A field's docstring is its help
text, in docs/configuration.md.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from tasks.config.access import AccessConfig
from tasks.config.base import Name, Positive, Settings

Variant = Literal["int8", "int4", "fp16", "bf16"]
LEAST_SECONDS, HOLD_SECONDS = 15.0, 4 * 3600.0
"""Defaults of a rollout. They are in no settings' digest, so that endpoints of releases before them are not deployed again."""


OWNED = (
    "--model", "--tokenizer", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--root-path", "--ssl-keyfile",
    "--ssl-certfile", "--load-format", "--config", "--generation-config", "--hf-config-path", "--hf-overrides", "--revision",
    "--max-model-len", "--gpu-memory-utilization", "--tensor-parallel-size", "--dtype", "--max-logprobs", "--headless",
    "--trust-remote-code", "--middleware", "--lora-modules", "--enable-lora", "--worker-cls", "--worker-extension-cls",
    "--tool-parser-plugin", "--reasoning-parser-plugin", "--logits-processors", "--allowed-local-media-path", "-tp",
    "--speculative-config", "--tokenizer-mode", "--skip-tokenizer-init", "--download-dir",
)  # fmt: skip
"""Options of `vllm serve` that Headway sets, or that serve other weights than those that were verified, or run code."""
TYPED = {
    "--max-model-len": "max_model_len",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--tensor-parallel-size": "tensor_parallel_size",
    "--dtype": "dtype",
}


class ExportConfig(Settings):
    """To ONNX, and what the exported model must prove."""

    format: Literal["", "onnx", "safetensors"] = Field("", exclude_if=lambda name: not name)
    """What is written: a graph for ONNX Runtime, or the checkpoint's own weights for vLLM, which has neither variants nor a race
    against PyTorch. Empty: what `deployment.runtime` serves."""
    precision: Literal["fp32"] = "fp32"
    """Of the model itself: it must answer as the checkpoint does, and only `fp32` does."""
    max_logit_error: float = Field(1e-4, gt=0)
    """Largest absolute difference of a logit between PyTorch and ONNX Runtime; in proportion where logits are beyond 10."""
    context_length: int | None = Field(None, ge=16, exclude_if=lambda length: length is None)
    """Tokens of prompt and answer that the endpoint takes. Empty: as many as the evaluation measured the model up to. A longer
    context is served whatever the loss there; learned positions, as GPT-2's, cannot be lengthened."""
    golden_prompts: tuple[str, ...] = ("def ", "import ", "class ", "for i in range(", "return self.")
    """Prompts whose greedy completions must be equal, token for token, and which a new endpoint must answer."""
    golden_tokens: Positive = 24
    """Tokens of a golden completion."""
    variants: tuple[Variant, ...] = ("int8",)
    """Smaller forms of the model beside it, for when it cannot answer: `int8`, `int4`, `fp16`, `bf16`."""
    max_loss_of_variant: float = Field(0.02, ge=0)
    """Share of bits by which a variant may need more than the checkpoint for the same held-out text; one beyond is left out."""
    heldout_bytes: Positive = 65_536
    """Held-out text, in bytes, on which bits per byte of the model and its variants are measured."""
    reference_prompts: int = Field(32, ge=0)
    """Held-out documents whose beginnings are completed, beside the golden prompts, for the reference of the model's answers."""
    max_slowdown: float = Field(1.1, ge=1)
    """Time a token under ONNX Runtime, as a multiple of PyTorch's, beyond which a model is refused."""
    allow_slower: bool = False
    """Whether a model that is slower than that is exported all the same."""
    speed_seconds: float = Field(5.0, gt=0)
    """Time that both take in turns for that comparison; five pairs of runs at least."""

    @field_validator("variants")
    @classmethod
    def _each_once(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        if len(set(variants)) != len(variants):
            raise ValueError(f"export.variants names {list(variants)}: name each once")
        return variants


class LimitsConfig(Settings):
    """What one caller may ask for, and what a server takes at all. Counted by the gateway, or by a server that stands alone."""

    requests_per_minute: Positive = 6000
    """Of one caller; more are answered 429 with Retry-After."""
    tokens_per_minute: Positive = 1_000_000
    """Of one caller, prompt and answer together. They are counted after the answer: who is beyond waits until it is paid off."""
    waiting: Positive = 32
    """Requests under way whose answer has not begun, in the whole server; more are answered 429 at once."""
    connections: Positive = 512
    """Open at once; more are answered 503, and closed at once beyond twice as many."""
    body_bytes: Positive = 1_000_000
    """Largest body of a request."""
    depth: Positive = 16
    """Deepest nesting of a body's JSON."""
    max_tokens: Positive = 512
    """Most tokens that one request may ask for."""
    request_seconds: float = Field(60.0, gt=0)
    """Time after which a request is given up, waiting included."""
    loading_seconds: float = Field(50.0, ge=0)
    """Of that, the time that a request waits for a model that is being loaded; then it is answered 503 with Retry-After."""
    read_seconds: float = Field(10.0, gt=0)
    """Time in which a client must have sent its request."""
    drain_seconds: float = Field(15.0, gt=0)
    """Time that requests under way have to finish when the server is asked to stop."""


class ReplicasConfig(Settings):
    """How many servers of a model stand behind the gateway."""

    least: int = Field(1, ge=0)
    """0: none while nobody asks; the first request then waits until one is ready."""
    most: Positive = 1
    """They are added while requests wait, and taken away when idle."""
    queue: Positive = 8
    """Requests under way at one replica, above which another is started."""
    idle_seconds: float = Field(300.0, gt=0)
    """Time without so many requests after which a replica over `least` is stopped."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"replicas.least is {self.least}, over replicas.most, {self.most}: raise `most`")
        return self


class RolloutConfig(Settings):
    """How a new model takes the traffic from the one before it, and what sends it back."""

    steps: tuple[int, ...] = (10, 50, 100)
    """Per cent of the traffic, one after the other; the last one is 100."""
    mirror: int = Field(10, ge=0, le=50)
    """Per cent of the requests that are also sent to the new model before it gets any, its answers thrown away."""
    step_requests: int = Field(50, ge=0)
    """Least evidence of a step: requests that the new model has had in it. 0: a step ends by `step_seconds`, judged or not."""
    least_seconds: float = Field(LEAST_SECONDS, ge=0, exclude_if=lambda value: value == LEAST_SECONDS)
    """Least time of a step, `step_seconds` where that is less."""
    step_seconds: float = Field(60.0, ge=0)
    """Time of a step after which it is not judged when evidence is missing. With `step_requests` 0 as well, steps do not wait."""
    hold_seconds: float = Field(HOLD_SECONDS, ge=0, exclude_if=lambda value: value == HOLD_SECONDS)
    """Time for which a step that is not judged then keeps its share, and waits for evidence, before the traffic goes back."""
    keep_warm_seconds: float = Field(300.0, ge=0)
    """Time for which the old model's servers stay, without traffic, for the way back; 0: they are stopped at once."""
    max_error_share: float = Field(0.02, ge=0, le=1)
    """Share of the new model's requests that may fail by its own fault; one that fails twice as many is not promoted."""
    max_slowdown: float = Field(1.5, gt=0)
    """Median and 95th percentile of the time to the first token and of the time a token, as a multiple of the old model's."""
    max_output_shift: float = Field(0.5, ge=0, le=1)
    """Greatest distance of two cumulative distributions (Kolmogorov-Smirnov) of a measure of answers."""

    @model_validator(mode="after")
    def _rises_and_ends(self) -> Self:
        shares = list(self.steps)
        if not shares or shares[-1] != 100 or shares != sorted(set(shares)) or shares[0] < 1:
            raise ValueError(f"rollout.steps is {shares}: write shares that rise and end with 100")
        if self.step_requests and not self.step_seconds:
            raise ValueError(
                "rollout.step_requests needs rollout.step_seconds: without requests a step would never end"
            )
        return self


class AnswersConfig(Settings):
    """What a server keeps of its answers, for the watch. Measures always; see docs/watch.md."""

    keep_text: bool = False
    """Whether prompts, answers and comments are kept too: secrets in them are replaced, and they are cut."""
    most_characters: Positive = 2000
    """Of a text that is kept."""
    expects: Literal["", "json", "python"] = ""
    """What answers must be: one that ended by itself and cannot be parsed as that is counted. Empty: nothing is expected."""


class AzureEndpointConfig(Settings):
    """A managed online endpoint of Azure Machine Learning, for `deployment.backend: azureml`. See docs/azureml.md."""

    subscription_id: str = ""
    """Subscription of the workspace; this and the next four, where they are empty: those of `cluster.azureml`."""
    resource_group: str = ""
    """Resource group of the workspace."""
    workspace: str = ""
    """Name of the workspace."""
    endpoint: str = ""
    """Azure Resource Manager of the cloud."""
    store: str = ""
    """Store of stores.yaml, on Azure Blob, that the model lies in."""
    name: str = Field("", pattern=r"^$|^[a-z][a-z0-9-]{1,30}[a-z0-9]$")
    """Name of the endpoint, which only one in a region can have; empty: `deployment.endpoint` and a digest of the workspace."""
    location: str = ""
    """Region; empty: the workspace's."""
    image: str = ""
    """Image of docker/endpoint.Dockerfile, in a registry that the endpoint's identity may pull from. For
    `deployment.runtime: vllm`, one that was built on vLLM's own, `vllm/vllm-openai:TAG@sha256:DIGEST`."""
    instance_type: str = ""
    """VM size, such as Standard_DS3_v2; empty: the smallest of a short list that the model fits in."""
    instances: Positive = 1
    """Machines of a deployment, or the fewest of them when it scales."""
    most_instances: Positive = 1
    """Machines up to which the autoscale rules go; over `instances`, each deployment gets a setting of Azure Monitor."""
    requests_per_day: Positive | None = Field(None, exclude_if=lambda number: number is None)
    """Quota of one caller in a day, in the policy of API Management; below a day at `limits.requests_per_minute`. Empty: none."""
    at_once: Positive = 8
    """Requests that one machine works at; more wait for `queue_ms`, and are then answered 429 by Azure ML."""
    queue_ms: Positive = 500
    """Time in milliseconds."""
    auth: Literal["key", "aad_token"] = "key"
    """What callers show: a key of the endpoint, or a token of Microsoft Entra."""
    identity: str = ""
    """Resource id of the user-assigned identity that pulls the image and reads the model (docs/azureml-endpoints.md)."""
    public: bool = True
    """Whether the endpoint is reached from outside the workspace's own network."""
    egress: bool = True
    """Whether its machines reach the internet; `false` does not apply in a workspace with a managed network."""
    create_minutes: float = Field(30.0, gt=0)
    """Time in which a deployment must have come up, and any other change must be done."""
    poll_seconds: float = Field(5.0, gt=0)
    """Time between two looks at a change, where Azure ML does not say how long to wait."""
    expires_hours: float = Field(0.0, ge=0)
    """Time after which the endpoint, a test one, is deleted by the watch; 0: never."""
    log_analytics: str = ""
    """Resource id of a Log Analytics workspace that diagnostic settings send to; empty: none are written."""
    tags: dict[str, str] = Field(default={})
    """Tags of the endpoint and its deployments."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.instances > self.most_instances:
            raise ValueError(
                f"azureml.instances is {self.instances}, over azureml.most_instances, {self.most_instances}: raise the latter"
            )
        return self


class VllmConfig(Settings):
    """vLLM's `vllm serve`, for `deployment.runtime: vllm`. See docs/endpoint.md, "vLLM"."""

    command: str = Field("vllm", pattern=r"^[^\s-]\S*$")
    """Program that is started: a name on the server's PATH, or a path. vLLM is no dependency of Headway; it has its own
    environment."""
    max_model_len: Positive | None = None
    """Tokens of prompt and answer; empty: those that the exported model declares."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of each GPU's memory that one server takes. Empty: 0.45 on this machine, where the new model stands beside the old
    one until it has the traffic, and 0.9 on Azure ML, where each has machines of its own."""
    tensor_parallel_size: Positive = 1
    """GPUs that one model is divided over."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type that it computes in. `auto` is vLLM's choice: bfloat16 for weights in float32."""
    arguments: tuple[str, ...] = ()
    """More options of `vllm serve`, such as `["--max-num-seqs", "64"]`. One that Headway sets itself, or that runs code of a
    model, is refused."""
    start_seconds: float = Field(600.0, gt=0)
    """Time in which it must have loaded the model and answer; it compiles and captures graphs before that."""
    max_logprob_error: float = Field(0.1, gt=0)
    """Largest mean difference, in nats, between its log probabilities of the golden answers' tokens and PyTorch's in float32. It
    is asked at each start, also after a crash."""

    @field_validator("arguments")
    @classmethod
    def _not_ours(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for each in arguments:
            name = each.partition("=")[0].replace("_", "-")
            if name.startswith("-") and any(
                owned.startswith(name) for owned in OWNED
            ):  # vLLM takes beginnings of names, too
                raise ValueError(
                    f"deployment.vllm.arguments has {each!r}: Headway sets it itself, or keeps it off. Take it out"
                    + (f", and set deployment.vllm.{TYPED[name]}" if name in TYPED else "")
                )
        return arguments


class DeploymentConfig(Settings):
    """Where the model is served."""

    backend: Literal["local", "azureml"] = "local"
    """Where it is served: on this machine, or by a managed online endpoint of Azure ML."""
    runtime: Literal["onnxruntime", "vllm"] = Field("onnxruntime", exclude_if=lambda name: name == "onnxruntime")
    """What computes the answers: ONNX Runtime in Headway's own server, or vLLM behind it, for models that need GPUs."""
    vllm: VllmConfig = Field(VllmConfig(), exclude_if=lambda section: section == VllmConfig())
    endpoint: Name = "local"
    """Name of the endpoint."""
    port: int | None = Field(None, ge=1, le=65535)
    """Port on loopback; empty: a free one, which the endpoint keeps."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Time in which a new server must answer its golden prompts; a second more for each 100 MB of its model."""
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    rollout: RolloutConfig = RolloutConfig()
    answers: AnswersConfig = AnswersConfig()
    degrade: bool = True
    """Whether a smaller variant or the previous model answers while the model cannot; each such answer is marked by a header."""
    azureml: AzureEndpointConfig = AzureEndpointConfig()

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if self.runtime == "vllm" and (self.replicas.most > 1 or not self.replicas.least):
            raise ValueError(
                f"deployment.runtime is vllm, and replicas are {self.replicas.least} to {self.replicas.most}: one server "
                "of vLLM takes its GPUs for good and works at many requests at once. Leave replicas at 1; many machines are "
                "Azure ML's (deployment.azureml.instances)"
            )
        return self

    @model_validator(mode="after")
    def _quota_bites(self) -> Self:
        by_rate, by_day = self.limits.requests_per_minute * 1440, self.azureml.requests_per_day
        if by_day is not None and by_day >= by_rate:
            raise ValueError(
                f"azureml.requests_per_day is {by_day}, and limits.requests_per_minute {self.limits.requests_per_minute} lets no "
                f"caller over {by_rate} in a day: lower the quota, or leave it empty"
            )
        return self
