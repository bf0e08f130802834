"""Where Prefect takes its settings from: what Headway puts into the environment, never what lies in the working directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


def take_no_files() -> None:
    """Have Prefect, when it is imported, take its settings from the environment and its profile alone.

    It also reads `.env`, `prefect.toml` and `pyproject.toml` of the working directory, which say which server runs are made on,
    and name a file of logging that may call anything: in a folder that others write to, they would choose. Looking at the files
    first is no help, for they may change before Prefect reads them.
    """
    if "prefect.settings" not in sys.modules and not any(isinstance(one, _PrefectSettings) for one in sys.meta_path):
        sys.meta_path.insert(0, _PrefectSettings())


class _PrefectSettings(MetaPathFinder):
    """Finds `prefect.settings`, and has it load as `_FromNowhere` does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "prefect.settings":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _FromNowhere(fullname, spec.origin)
        return spec


class _FromNowhere(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Load the settings in the root folder, which is root's, and leave out files whenever they are loaded again."""
        working = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            os.chdir("/")
            super().exec_module(module)
            from prefect.settings import sources

            os.environ.setdefault("PREFECT_PROFILES_PATH", str(sources._get_profiles_path()))
        finally:
            os.fchdir(working)
            os.close(working)
        _empty_files(module.base.PrefectBaseSettings, sources)


def _empty_files(settings: Any, sources: ModuleType) -> None:
    """Have a class of settings, and those that are made of it, find nothing in files but in the profile."""
    for one in settings.__subclasses__():
        _empty_files(one, sources)
    if "settings_customise_sources" not in vars(settings):
        return
    every = settings.settings_customise_sources.__func__

    def without_files(cls: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = every(cls, *args, **kwargs)
        for source in chosen:
            # Emptied, not left out: pydantic warns of a class that names a TOML file and has no source for it.
            if isinstance(source, sources.DotEnvSettingsSource):
                source.env_vars = {}
            elif isinstance(source, sources.TomlConfigSettingsSourceBase):
                source.toml_data = {}
        return chosen

    settings.settings_customise_sources = classmethod(without_files)
