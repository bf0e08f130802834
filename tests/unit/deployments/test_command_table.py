"""The table of the commands: what `--help` shows of each, under which heading, with examples that the command takes."""

import shlex

import pytest
import typer.main
from typer.core import TyperCommand

from deployments.cli.commands import COMMANDS, EXAMPLES, PANELS, Commands, clause
from deployments.cli.main import app

pytestmark = pytest.mark.unit


def test_every_row_is_what_its_function_says():
    """`headway --help` is written from the rows alone, and must not say something else than the command's own help."""
    for words, row in COMMANDS.items():
        group, _, word = words.rpartition(" ")
        command, written = Commands(group)[word], TyperCommand(words, help=row.summary)
        assert command.get_short_help_str(1000) == written.get_short_help_str(1000) == row.summary, words
        assert command.callback or command.commands, words


def test_every_command_stands_in_one_panel_with_an_example_or_two():
    in_panels = [words for panel in PANELS.values() for words in panel]
    assert sorted(in_panels) == sorted(COMMANDS)
    assert [w for w in COMMANDS if not Commands(w) and not 1 <= len(EXAMPLES[w]) <= 2] == []


def context_of(words):
    """The context of the command that the words call, without calling it."""
    group, name = typer.main.get_command(app), "headway"
    context = group.make_context(name, words)
    while hasattr(group, "commands") and (rest := [*context._protected_args, *context.args]):
        name, group, words = group.resolve_command(context, rest)
        context = group.make_context(name, words, parent=context)
    return context


@pytest.mark.parametrize("words", [words for words, examples in EXAMPLES.items() if examples])
def test_every_example_is_what_its_command_takes(words):
    for example in EXAMPLES[words]:
        line = shlex.split(example.partition(" > ")[0])
        assert line[0] == "headway" and context_of(line[1:]).command_path == f"headway {words}"


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_line_of_help_is_over_a_hundred_columns(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    context = typer.main.get_command(app).make_context("headway", [], resilient_parsing=True)
    pages = {"": context.get_help()}
    for words in COMMANDS:
        group, _, word = words.rpartition(" ")
        command = Commands(group)[word]
        pages[words] = command.get_help(command.make_context(words, [], parent=context, resilient_parsing=True))
    assert [line for page in pages.values() for line in page.splitlines() if len(line) > min(int(columns), 100)] == []
    assert all("-h, --help" in page for page in pages.values())
    assert [words for words in COMMANDS if EXAMPLES[words] and EXAMPLES[words][0] not in pages[words]] == []
    assert all(f"{title}:" in pages[""] for title in PANELS)


def test_completion_of_a_command_imports_none():
    group = typer.main.get_command(app)
    context = group.make_context("headway", [], resilient_parsing=True)
    offered = {one.value: one for one in group.shell_complete(context, "re")}
    assert sorted(offered) == sorted(word for word in COMMANDS if word.startswith("re"))
    assert all(type(command) is TyperCommand for command in group.commands.values())


def test_a_sentence_is_cut_where_a_clause_ends():
    text = "Show the limits of an account; or whether machines fit, and if not, why."
    assert clause(text, 100) == text
    assert clause(text, 60) == "Show the limits of an account."
    assert clause("Back up datasets, models, and all else.", 30) == "Back up datasets, models."
    assert clause("One two three four five", 12) == "One two ..."
