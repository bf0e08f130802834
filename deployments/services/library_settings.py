"""Where libraries take their settings from: what Headway puts into the environment, never what lies in the working directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


def take_no_files() -> None:
    """Have Prefect and matplotlib, when they are imported, take no settings from files of the working directory.

    Prefect reads `.env`, `prefect.toml` and `pyproject.toml` there, which say which server runs are made on, and name a file of
    logging that may call anything; matplotlib reads `matplotlibrc`, which may have TeX run. In a folder that others write to,
    they would choose. Looking at the files first is no help, for they may change before they are read.
    """
    if not any(isinstance(one, _Settings) for one in sys.meta_path):
        sys.meta_path.insert(0, _Settings())


class _Settings(MetaPathFinder):
    """Finds the packages that read settings while they are imported, and has them load as `_FromNowhere` does."""

    PACKAGES = ("prefect.settings", "matplotlib")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _FromNowhere(fullname, spec.origin)
        return spec


class _FromNowhere(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Run the package in the root folder, which is root's; Prefect's finds no files when it is loaded again, either."""
        working = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            os.chdir("/")
            super().exec_module(module)
            if self.name == "prefect.settings":
                from prefect.settings import sources

                os.environ.setdefault("PREFECT_PROFILES_PATH", str(sources._get_profiles_path()))
                _empty_files(module.base.PrefectBaseSettings, sources)
        finally:
            os.fchdir(working)
            os.close(working)


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
