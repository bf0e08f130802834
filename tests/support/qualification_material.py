"""Qualifications that never were, of any number of machines, for the tests and pictures of their page: figures in the order of
an ND H100 v5, one slow machine, one dead one, one with an old driver. Equal arguments give equal values.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tasks.config.qualification import COLLECTIVES
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Measurement, Probe, RankReport, Row, Sweep, TrainingPoint
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, Reason

GPUS = 8
SIZES = tuple(2**power for power in range(10, 34))
NORMS = {"node": 480.0, "all": 440.0, "pair": 380.0}
SKU = Sku.model_validate(
    {
        "name": "nd96isr_h100_v5",
        "vendor": "nvidia",
        "sources": {"azhpc": {"what": "a page of figures", "date": "2026-11-01"}},
        "limits": {
            "matmul_bf16": {"unit": "TFLOP/s", "norm": 700, "warn": 660, "fail": 600, "source": "azhpc"},
            "memory_bandwidth": {"unit": "GB/s", "norm": 3000, "warn": 2850, "fail": 2700, "source": "azhpc"},
            "host_to_device": {"unit": "GB/s", "norm": 55, "warn": 52, "fail": 50, "source": "azhpc"},
            "soak_drop": {"better": "lower", "norm": 0.01, "warn": 0.03, "fail": 0.08, "source": "azhpc"},
            "temperature": {"unit": "C", "better": "lower", "warn": 80, "fail": 87, "source": "azhpc"},
            "gpu_count": {"better": "equal", "fail": 8, "source": "azhpc"},
            "scratch_write": {"unit": "GB/s", "norm": 20, "warn": 15, "fail": 10, "source": "azhpc"},
            "scaling_efficiency": {"norm": 0.95, "warn": 0.8, "fail": 0.7, "source": "azhpc"},
        },
        "collectives": [
            {"collective": one, "scope": scope, "bytes": 2**30, "norm": norm, "warn": norm * 0.96, "fail": norm * 0.9}
            | {"source": "azhpc"}
            for one in COLLECTIVES
            for scope, norm in NORMS.items()
        ],
    }
)
NAME = "ccw-hpc-{}"
FAULTS = ("slow", "dead", "old")
MEASURED_PAIRS = 64
"""Machines up to which the sweeps of the pairs are there too, beside their verdicts."""


def sample(nodes: int, *, faults: Sequence[str] = FAULTS, seed: int = 8, text: str = "") -> dict[str, Any]:
    """What `qualification.json` holds of so many machines; `text` stands wherever a text of a machine can stand."""
    chance = random.Random(seed)
    names = tuple(f"{text}{NAME.format(index)}" for index in range(1, nodes + 1))
    slow = names[nodes // 3] if "slow" in faults and nodes > 1 else ""
    dead = names[-1] if "dead" in faults and nodes > 3 else ""
    old = names[2] if "old" in faults and nodes > 2 else ""
    there = [name for name in names if name != dead]
    ranks = [
        rank
        for place, name in enumerate(there)
        for rank in _machine(place, name, chance, slow=name == slow, old=name == old, text=text)
    ]
    measured = Measurement(
        nodes=tuple(there),
        expected_nodes=nodes,
        ranks_per_node=GPUS,
        ranks=tuple(ranks),
        sweeps=tuple(_sweeps(there, slow, chance)),
        training=tuple(_training(there, slow, text)),
        error=text,
        seconds=412.0,
    )
    verdict = _verdict(names, there, slow, old, text)
    out = {name: f"{text}too slow" for name in (slow, dead) if name}
    return {
        "name": f"{text}ccw",
        "verdict": verdict.model_dump(mode="json") | {"pairs": _pairs(names, there, slow, chance)},
        "remaining": {"nodes": [name for name in names if name not in out], "excluded": out},
        "expires": "2026-11-23T10:00:00+00:00",
        "measured": measured.model_dump(mode="json"),
        "sku": SKU.model_dump(mode="json"),
        "checks": [],
        "drained": [{"node": name, "done": name == slow, "said": f"{text}no right to it"} for name in out],
        "requests": [{"node": slow, "what": "redeploy", "method": "POST", "url": f"{text}/redeploy", "body": None}]
        * bool(slow),
    }


def _machine(place: int, name: str, chance: random.Random, *, slow: bool, old: bool, text: str) -> list[RankReport]:
    driver = "535.161.08" if old else "550.90.07"
    versions = {
        "driver": driver,
        "cuda": "12.4",
        "nccl": "2.21.5",
        "ofed": "24.04",
        "image": f"{text}microsoft-dsvm:2204",
    }
    return [
        RankReport(
            rank=place * GPUS + gpu,
            local_rank=gpu,
            node=name,
            host=f"{text}host-{place}",
            probes=tuple(_probes(gpu, chance, slow=slow, old=old, text=text)),
            versions=versions if gpu == 0 else {},
            done=("health", "compute", "memory", "collectives", "pairs"),
        )
        for gpu in range(GPUS)
    ]


def _probes(gpu: int, chance: random.Random, *, slow: bool, old: bool, text: str) -> list[Probe]:
    where = f"{text}GPU {gpu}"

    def about(value: float) -> float:
        return value * chance.gauss(1, 0.006)

    rate = about(560.0 if slow and gpu == 3 else 702.0)
    found = [
        Probe(check="matmul_bf16", measured=rate, unit="TFLOP/s", where=where),
        Probe(check="memory_bandwidth", measured=about(3010), unit="GB/s", where=where),
        Probe(check="host_to_device", measured=about(55), unit="GB/s", where=where),
        Probe(check="temperature", measured=about(86 if slow and gpu == 3 else 64), unit="C", where=where),
    ]
    if gpu:
        return found
    xid = Probe(
        check="xid", measured=f"{text}Xid 63", finding="warn", said=f"{text}NVRM: Xid (PCI:0001): 63", where=where
    )
    return [
        *found,
        Probe(check="gpu_count", measured=8.0),
        Probe(check="scratch_write", measured=about(21), unit="GB/s"),
        Probe(check="scratch_read", measured=about(40), unit="GB/s"),
        Probe(check="checkpoint_seconds", measured=about(38), unit="s"),
        Probe(check="aznhc", measured=f"{text}24 checks passed"),
        *(
            [Probe(check="link_flaps", status="missing", said=f"{text}no leave to read the kernel's log")]
            if old
            else []
        ),
        *([xid] if slow else []),
    ]


def _rows(norm: float, chance: random.Random, share: float, sizes: Sequence[int] = SIZES) -> tuple[Row, ...]:
    rows = []
    for size in sizes:
        busbw = share * norm * 1.04 * size / (size + 3e7) * chance.gauss(1, 0.006)
        inside = busbw * chance.gauss(1, 0.02)
        rows.append(Row(bytes=size, algbw=busbw / 1.9, busbw=busbw, wrong=0, busbw_in_place=inside, wrong_in_place=0))
    return tuple(rows)


def _sweeps(names: list[str], slow: str, chance: random.Random) -> list[Sweep]:
    told = {"backend": "nccl", "tool": "nccl-tests 2.13.9"}
    found = [
        Sweep(
            collective=one,
            scope="node",
            nodes=(name,),
            ranks=GPUS,
            rows=_rows(NORMS["node"], chance, 0.8 if name == slow else 1),
            transport=("P2P", "NVLS"),
            **told,
        )
        for one in (COLLECTIVES if len(names) < 9 else COLLECTIVES[:1])
        for name in names
    ]
    if len(names) > 1:
        found += [
            Sweep(
                collective=one,
                scope="all",
                nodes=tuple(names),
                ranks=GPUS * len(names),
                rows=_rows(NORMS["all"], chance, 0.7 if slow and one == "all_reduce" else 1),
                transport=("NET/IB/GDR",),
                **told,
            )
            for one in COLLECTIVES
        ]
    if len(names) <= MEASURED_PAIRS:
        found += [_pair(a, b, slow, chance, told) for a, b in itertools.combinations(names, 2)]
    return found


def _pair(a: str, b: str, slow: str, chance: random.Random, told: dict[str, str]) -> Sweep:
    rows = _rows(NORMS["pair"], chance, 0.55 if slow in (a, b) else 1, SIZES[-4:])
    used = ("NET/IB/GDR",)
    return Sweep(collective="all_reduce", scope="pair", nodes=(a, b), ranks=2 * GPUS, rows=rows, transport=used, **told)


def _pairs(names: tuple[str, ...], there: list[str], slow: str, chance: random.Random) -> list[dict[str, Any]]:
    found = []
    for a, b in itertools.combinations(names, 2):
        if a not in there or b not in there:
            found.append({"a": a, "b": b, "busbw_gb_s": None, "verdict": "unknown"})
            continue
        share = 0.55 if slow in (a, b) else 1
        blamed = "a" if slow == a else "b" if slow == b else ""
        rate = 385 * share * chance.gauss(1, 0.01)
        kind = "failed" if blamed else "healthy"
        found.append({"a": a, "b": b, "busbw_gb_s": rate, "verdict": kind, "blamed": blamed})
    return found


def _training(names: list[str], slow: str, text: str) -> list[TrainingPoint]:
    points, count = [], 1
    while count <= len(names):
        share = 0.05 + 0.03 * count.bit_length()
        points.append(
            TrainingPoint(
                nodes=tuple(names[:count]),
                ranks=GPUS * count,
                step_seconds=1.9 / (1 - share),
                tokens_per_step=2**22,
                tflops_per_rank=410 * (1.08 - share) * (0.93 if slow in names[:count] and count > 1 else 1),
                convention="megatron",
                data_share=0.01,
                communication_share=share,
                compute_share=0.99 - share,
                engine=f"{text}torch",
            )
        )
        count *= 2
    return points


def _verdict(names: tuple[str, ...], there: list[str], slow: str, old: str, text: str) -> ClusterVerdict:
    nodes = []
    for name in names:
        reasons = tuple(_reasons(name, slow, old, name not in there, text))
        kind = reasons[0].verdict if reasons else "healthy"
        nodes.append(NodeVerdict(name=name, verdict=kind, reasons=reasons))
    together = Reason(
        node="",
        check="all_reduce: bus bandwidth",
        where=f"{text}all machines",
        measured=312.4,
        unit="GB/s",
        limit=">= 396",
        source="azhpc",
        verdict="failed",
        remedy=f"{text}Look at the machine that pairs blame.",
    )
    sound = all(node.verdict == "healthy" for node in nodes)
    return ClusterVerdict(
        verdict="healthy" if sound else "unknown" if len(there) < len(names) else "failed",
        sku=SKU.name,
        sku_digest="0" * 64,
        nodes=tuple(nodes),
        reasons=() if sound else (together,),
    )


def _reasons(name: str, slow: str, old: str, dead: bool, text: str) -> list[Reason]:
    told = {"node": name, "source": f"{text}azhpc"}
    if dead:
        return [
            Reason(
                check="result", measured=None, limit="8 ranks", verdict="unknown", said="no rank has a result", **told
            )
        ]
    if name == slow:
        rate = Reason(
            check="matmul_bf16", where="GPU 3", measured=559.8, unit="TFLOP/s", limit=">= 600", verdict="failed", **told
        )
        pair = Reason(check="pairs", measured=211.3, unit="GB/s", limit=">= 342", verdict="failed", **told)
        return [rate, pair]
    if name == old:
        return [Reason(check="version_driver", measured="535.161.08", limit="550.90.07", verdict="degraded", **told)]
    return []
