"""Who is asked for what alerts want to know: Prefect for schedules, the registry for champions, the folders for the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.platform import mlflow_server, prefect_server, worker
from deployments.settings import PlatformConfig
from deployments.watch.alerts import Sources
from deployments.watch.schedules import Schedules
