"""The table of the commands: what `--help` shows of each is what its function's docstring says."""

import pytest
from typer.core import TyperCommand

from deployments.cli.commands import COMMANDS, Commands

pytestmark = pytest.mark.unit


def test_every_row_is_what_its_function_says():
    """`headway --help` is written from the rows alone, and must not say something else than the command's own help."""
    for words, row in COMMANDS.items():
        group, _, word = words.rpartition(" ")
        command, written = Commands(group)[word], TyperCommand(words, help=row.summary)
        assert command.get_short_help_str(1000) == written.get_short_help_str(1000) == row.summary, words
        assert command.callback or command.commands, words
