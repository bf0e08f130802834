"""All faults, in the order in which they are injected: those that leave the endpoint asking for keys come last."""

from __future__ import annotations

from deployments.rehearsal.data import ArtifactFlipped, DataDrifted, SecretGiven, ShardPoisoned
from deployments.rehearsal.fault import Fault
from deployments.rehearsal.network import StoreLost, StoreRefuses, StoreSlow, WebhookForged
from deployments.rehearsal.runs import LostAnswer, OrchestratorKilled, PlatformKilled, PrefectKilled, TwoRuns
from deployments.rehearsal.serving import CanaryFails, CanarySlow, KeyRevoked, ModelTampered, Overload, ServerKilled
from deployments.rehearsal.training import (
    CheckpointFlipped,
    CheckpointTorn,
    DiskFull,
    EvictionNotice,
    GpuFails,
    LauncherKilled,
    MachineLost,
    MachineOff,
    RankKilled,
    SlowMachine,
)

FAULTS: tuple[type[Fault], ...] = (
    OrchestratorKilled,
    LostAnswer,
    TwoRuns,
    PrefectKilled,
    PlatformKilled,
    RankKilled,
    LauncherKilled,
    MachineLost,
    MachineOff,
    CheckpointFlipped,
    CheckpointTorn,
    EvictionNotice,
    DiskFull,
    GpuFails,
    SlowMachine,
    StoreRefuses,
    StoreLost,
    StoreSlow,
    WebhookForged,
    ArtifactFlipped,
    ShardPoisoned,
    DataDrifted,
    SecretGiven,
    ServerKilled,
    Overload,
    CanaryFails,
    CanarySlow,
    KeyRevoked,
    ModelTampered,
)
