"""What is wrong with a model in service: not looked at, degraded, changed, its key revoked, odd answers. For alert_rules.py."""

from __future__ import annotations

from deployments.configuration.platform import AlertsConfig
from deployments.telemetry.alert_seen import Found, Instance, Seen, clock

DAY = 86_400.0
VERSION_CUT = 64 - 12
"""Digits of a version that are not shown."""


def stale(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.champions is None:
        return None
    old = (c for c in seen.champions if seen.now - c.since > limits.champion_revalidated_days * DAY)
    return [
        Instance(
            champion.model,
            f"the champion of {champion.model} was not revalidated in time",
            f"last found good {clock(champion.since)}",
            {"model": champion.model},
        )
        for champion in old
    ]


def degraded(seen: Seen, limits: AlertsConfig) -> Found:
    """Until it is found valid, or another model is the champion."""
    if seen.champions is None:
        return None
    return [
        Instance(
            champion.model,
            f"the champion of {champion.model} was found {champion.verdict}",
            champion.why,
            {"model": champion.model},
        )
        for champion in seen.champions
        if champion.verdict in ("degraded", "invalid")
    ]


def unusual_answers(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.anomalies is None:
        return None
    return [
        Instance(
            name,
            f"endpoint/{name} does not answer as it did: {', '.join(found['columns'])}",
            "; ".join(f"{column}: {', '.join(moved)}" for column, moved in found["columns"].items()),
            {"endpoint": name, "model": str(found["model"])},
        )
        for name, found in seen.anomalies.items()
    ]


def tampered(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.tampered is None:
        return None
    return [
        Instance(
            model, f"the files of {model[:-VERSION_CUT]} are not what was signed", str(found["said"]), {"model": model}
        )
        for model, found in seen.tampered.items()
    ]


def untrusted(seen: Seen, limits: AlertsConfig) -> Found:
    """Until another model is served there, it is signed anew, or it is stopped."""
    if seen.untrusted is None:
        return None
    return [
        Instance(
            one.endpoint,
            f"endpoint/{one.endpoint} serves {one.model[:-VERSION_CUT]}, whose signature does not count",
            one.why,
            {"endpoint": one.endpoint, "model": one.model},
        )
        for one in seen.untrusted
    ]
