"""Where and when flows run: the command line, the local platform, the shipped configurations."""

from tasks.common import old_names

old_names.install()
