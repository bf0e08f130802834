"""Modules that moved, under the names that stand outside the code: in scripts of queued jobs, and in the README's example.

A batch script that was rendered before an upgrade says `python -m tasks.process`, and starts after it. Each old name works for
one release; `python -m` and `import` find the module under its new name. This file goes with the release after 0.2.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

MOVED = {
    "tasks.process": "tasks.common.process",
    "tasks.settings": "tasks.config.base",
    "tasks.jobs.checkpoint_writer": "tasks.jobs.checkpoint.writer",
    "tasks.jobs.mirror": "tasks.jobs.node.mirror",
    "tasks.jobs.mpi": "tasks.jobs.node.mpi",
    "tasks.jobs.origins": "tasks.jobs.checkpoint.origins",
    "tasks.jobs.own": "tasks.jobs.node.user_program",
    "tasks.jobs.ray_agent": "tasks.jobs.ray.agent",
    "tasks.jobs.ray_cluster": "tasks.jobs.ray.cluster",
    "tasks.jobs.ray_driver": "tasks.jobs.ray.driver",
    "tasks.jobs.rendezvous": "tasks.jobs.node.rendezvous",
    "tasks.jobs.runtime": "tasks.jobs.node.runtime",
    "tasks.jobs.scratch": "tasks.jobs.node.scratch",
    "deployments.cli.configuration": "tasks.config.files",
    "deployments.configuration.files": "tasks.config.files",
    "deployments.platform.prefect_server": "deployments.services.prefect_server",
}
"""Old name: new name. `tasks.jobs.node` is a package now, and starts as before."""


class _Moved:
    """Finds a module that moved: the same module object for `import`, its code for `python -m`.

    A finder and a loader by its methods: `importlib.abc` brings fifteen modules into every process that starts.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the old name there

    def get_code(self, fullname: str) -> CodeType | None:
        spec = importlib.util.find_spec(MOVED[fullname])
        assert spec is not None and isinstance(spec.loader, SourceFileLoader), fullname
        return spec.loader.get_code(MOVED[fullname])

    def get_source(self, fullname: str) -> str | None:
        return None


def install() -> None:
    """Have Python find modules under their old names too, after every other way of finding them."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
