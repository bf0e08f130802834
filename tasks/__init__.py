"""Headway's stages and what they stand on. Nothing is re-exported: import the module that you mean."""

from tasks.common import old_names

old_names.install()
