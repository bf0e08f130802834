"""Every command of `headway`: its words, the function that it calls, and the line that `--help` shows of it.

A command's module is imported when the command is called, as in click's documentation
(https://click.palletsprojects.com/en/stable/complex/#lazily-loading-subcommands): `headway --help` needs none of them, and no
command needs another's imports.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup


class Row(NamedTuple):
    """A command, or a group of those whose words begin with the group's."""

    function: str
    """`MODULE:NAME` below `deployments.cli`; empty for a group that does nothing by itself."""
    summary: str
    """The first sentence of the function's docstring; of a group all that there is to read."""


COMMANDS = {
    "init": Row("init:init", "Write a configuration file, after three questions: `headway retrain -c FILE` takes it."),
    "validate": Row("data.judging:validate", "Validate a dataset: every document, and the corpus as a whole."),
    "retrain": Row(
        "retrain:retrain",
        "Take a dataset to a served model: validate, preprocess, benchmark, plan, train, evaluate, export, deploy.",
    ),
    "revalidate": Row(
        "revalidate:revalidate",
        "Check a model's champion byte by byte, compare new data with its training data, and evaluate it on the new data.",
    ),
    "drift": Row(
        "data.judging:drift", "Test whether new data has drifted from a reference, in what, and how certain that is."
    ),
    "qualify": Row(
        "cluster.qualify:qualify", "Measure the cluster now, and judge every machine by the limits of its hardware."
    ),
    "hardware": Row(
        "planning.machines:hardware",
        "List the kinds of machines that clusters are judged as; or show one in full, each number with its source.",
    ),
    "plan": Row(
        "planning.plan:plan", "Plan a training: whether it fits, its speed, time and cost, and how often it will fail."
    ),
    "simulate": Row(
        "planning.simulate:simulate",
        "Simulate a training with failures, at three rates: what share of its time is useful, and what took the rest.",
    ),
    "prices": Row(
        "planning.machines:prices",
        "Show prices of machines per hour and storage per month; or, with `update`, fetch today's prices from Azure.",
    ),
    "quota": Row(
        "planning.machines:quota",
        "Show an account's quota; or whether machines of a size fit into it, and if not, what to request from Azure.",
    ),
    "cost": Row(
        "planning.cost:cost",
        "Show the machine hours and the actual cost of a run, stage by stage, next to its plan.",
    ),
    "rightsize": Row(
        "planning.cost:rightsize",
        "Report for each stored training whether its machines were too small, too large or right, with the measured use.",
    ),
    "scaling": Row(
        "planning.trainings:scaling",
        "Show how stored trainings scale: the rate of a GPU by GPUs and by parameters, and the plan's; regressions are flagged.",
    ),
    "seeds": Row(
        "planning.trainings:seeds",
        "Show how much stored trainings with different seeds differ, and what comparison.seed_noise should be.",
    ),
    "train-log": Row(
        "planning.trainings:train_log",
        "Show losses, learning rates, speed and the end of a training from its log, in the fields of our own `metrics.jsonl`.",
    ),
    "approve": Row(
        "operations.approve:approve",
        "List what waits for an approval; with a question and --approve or --reject, answer.",
    ),
    "preprocess": Row(
        "data.preprocess:preprocess",
        "Turn text into Megatron .bin/.idx, byte for byte what its preprocess_data.py writes.",
    ),
    "tokens": Row("data.preprocess:tokens", "Check a Megatron .bin/.idx and show its content."),
    "mixture": Row(
        "data.preprocess:mixture", "Check datasets and their weights, and print Megatron's arguments for the mixture."
    ),
    "lineage": Row(
        "registry.lineage:lineage",
        "Show what an artifact, model or endpoint was made from, down to the raw data, code commit and configuration.",
    ),
    "artifacts": Row(
        "registry.artifacts:artifacts",
        "List artifacts with their versions, newest first within a name; or the history of one name.",
    ),
    "verify": Row(
        "registry.artifacts:verify",
        "Check every byte of an artifact against its manifest, and a checkpoint or model against its signature.",
    ),
    "sign": Row("registry.trust:sign", "Sign an artifact again with this home's key, after checking every byte of it."),
    "diff": Row(
        "registry.history:diff",
        "Show what differs from A to B: files, configuration, metrics, and what they were made from.",
    ),
    "rollback": Row(
        "registry.history:rollback",
        "Make an earlier version of an artifact the current one again; for a model, also the champion.",
    ),
    "models": Row(
        "registry.models:models",
        "List the versions of models, newest first: champion, challenger or previous, metrics, and what endpoints serve them.",
    ),
    "promote": Row(
        "registry.models:promote",
        "Make a version the champion of its model, if every byte verifies and a trusted key signed it.",
    ),
    "model": Row("", "Push models to the Hugging Face hub."),
    "model push": Row(
        "registry.models:push",
        "Push a model to the Hugging Face hub, if every byte verifies and a trusted key signed it.",
    ),
    "prune": Row("registry.history:prune", "Delete old versions that nothing needs."),
    "copy": Row(
        "registry.artifacts:copy",
        "Copy an artifact to another store, with its lineage and signatures; verified on arrival.",
    ),
    "backup": Row(
        "registry.backup:backup",
        "Back up datasets, tokenizers, checkpoints, models, and all records of them.",
    ),
    "restore": Row("registry.backup:restore", "Rebuild an empty home from a backup; every byte is verified."),
    "complete": Row("operations.endpoint:complete", "Ask a served model to complete a text."),
    "watch": Row(
        "operations.watch:watch",
        "Check an endpoint's answers since the last check; an anomaly becomes an event, with the evidence in a file.",
    ),
    "submit": Row(
        "cluster.submit:submit",
        "Run your own program on a backend until it ends: submitted once, retried when machines fail, adopted after a crash.",
    ),
    "jobs": Row(
        "cluster.job:jobs",
        "List open jobs: state, machines, attempts, and whether each is supervised.",
    ),
    "reconcile": Row(
        "cluster.job:reconcile",
        "Record the end of jobs that ended unsupervised, and list those that still run unsupervised.",
    ),
    "doctor": Row(
        "operations.doctor:doctor",
        "Report what is missing or broken and how to fix it; with -c, also for the backend that the configuration names.",
    ),
    "rehearse": Row(
        "operations.rehearse:rehearse",
        "Make everything go wrong that goes wrong in production, in a home of its own, and check that what is promised holds.",
    ),
    "up": Row(
        "operations.platform:up", "Start the whole platform: Prefect, MLflow, a worker, the watch, and all deployments."
    ),
    "run": Row("operations.platform:run", "Start a flow run of a deployment on the platform, and return."),
    "deployments": Row("operations.platform:deployments", "List all deployments with their schedules."),
    "status": Row(
        "operations.platform:status",
        "Show what runs, since when and in which version; the last runs, the next schedules, what waits, and what is wrong.",
    ),
    "down": Row("operations.platform:down", "Stop the platform: no process of it is left."),
    "audit-log": Row(
        "registry.audit:audit_log", "List the audit log, newest first: who did what, when and why, and who was refused."
    ),
    "dataset": Row("", "Publish files as dataset versions, and list them."),
    "dataset publish": Row("data.publishing:publish_dataset", "Publish files as a dataset version."),
    "dataset list": Row("data.publishing:list_datasets", "List all dataset versions, newest first."),
    "tokenizer": Row("", "Publish Hugging Face tokenizers as artifacts."),
    "tokenizer publish": Row(
        "data.publishing:publish_tokenizer",
        "Publish a folder as a tokenizer version, to be named by `preprocessing.tokenizer.ref`.",
    ),
    "checkpoint": Row("", "Publish models that others trained as artifacts, to start from."),
    "checkpoint publish": Row(
        "data.publishing:publish_checkpoint",
        "Publish a Hugging Face folder as a checkpoint version, to be named by `training.base`.",
    ),
    "trust": Row("", "Manage trusted keys: list, add, revoke."),
    "trust list": Row("registry.trust:list_", "List the trusted keys, what each may sign, and the revoked keys."),
    "trust add": Row("registry.trust:add", "Trust a key."),
    "trust revoke": Row(
        "registry.trust:revoke",
        "Revoke a key: neither new signatures nor those that it has made count any more.",
    ),
    "endpoint": Row("", "Manage endpoints: list, stop, render, and their API keys."),
    "endpoint render": Row(
        "operations.endpoint:render",
        "Print or write the YAML of an endpoint and its deployment on Azure ML, and the rules around them.",
    ),
    "endpoint list": Row(
        "operations.endpoint:list_", "List endpoints, the model that each serves, and whether it answers."
    ),
    "endpoint stop": Row("operations.endpoint:stop", "Stop an endpoint."),
    "endpoint key": Row("", "API keys of an endpoint: add, list, revoke."),
    "endpoint key add": Row("operations.endpoint:add_key", "Create a key and print it; it is shown only once."),
    "endpoint key list": Row("operations.endpoint:list_keys", "List the keys of an endpoint, without their values."),
    "endpoint key revoke": Row("operations.endpoint:revoke_key", "Revoke a key."),
    "estate": Row("", "Azure's side of it: its resources and roles as templates, and a deployment as settings."),
    "estate render": Row(
        "operations.estate:render",
        "Write the ARM templates of an estate, with a README that says how to deploy them and what they cost.",
    ),
    "estate connect": Row(
        "operations.estate:connect", "Write the settings of a home out of the outputs of an estate's deployment."
    ),
    "estate audit": Row(
        "operations.estate:audit",
        "Judge what is there by Microsoft's recommendations: exports of Azure, and this home.",
    ),
    "notify": Row("", "Channels for notifications of failures, closed gates, approvals and alerts."),
    "notify test": Row(
        "operations.platform:notify",
        "Send a test message through each channel of the platform's settings, and show the result.",
    ),
    "job": Row("", "One job: render, show, cancel, logs."),
    "job render": Row(
        "cluster.job:render", "Print exactly what would be submitted for a stage, without submitting it."
    ),
    "job show": Row(
        "cluster.job:show",
        "Show everything about one job: its state, its request, each submission and how it ended, what ranks reported.",
    ),
    "job cancel": Row("cluster.job:cancel", "Cancel a job on its backend."),
    "job logs": Row(
        "cluster.job:logs",
        "Print the logs of a job's ranks, the failing rank first; with --follow as they are written.",
    ),
    "events": Row("operations.events:events", "List events: what came, what it caused, and what was refused and why."),
    "events send": Row("operations.events:send", "Send an event by hand."),
    "person": Row("", "Manage persons and their rights: add, list, remove, renew tokens."),
    "person add": Row("operations.users:add", "Add someone and print their token; it is shown only once."),
    "person renew": Row("operations.users:renew", "Give someone a new token and print it; it is shown only once."),
    "person remove": Row("operations.users:remove", "Remove someone."),
    "person list": Row(
        "operations.users:list_", "List persons and their rights, and which rights the policy asks for."
    ),
}
"""By the command's words."""
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Start": {
        "init": (
            "headway init",
            "headway init --yes --data mine --size tiny",
        ),
        "retrain": (
            "headway retrain -c headway.yaml",
            "headway retrain -c tiny --set training.steps=200 --dry-run",
        ),
        "complete": ("headway complete tiny 'def '",),
        "doctor": (
            "headway doctor -c slurm",
            "headway doctor -c mine.yaml --rights",
        ),
    },
    "Data": {
        "dataset": (),
        "dataset publish": (
            "headway dataset publish mine notes/ --include '*.txt'",
            "headway dataset publish wiki 'hf://datasets/ORG/NAME@main/data/train-*'",
        ),
        "dataset list": ("headway dataset list",),
        "validate": ("headway validate mine -c tiny",),
        "drift": ("headway drift mine new",),
        "preprocess": ("headway preprocess --input a.jsonl --tokenizer-model tok --output-prefix a",),
        "tokens": ("headway tokens out_text_document",),
        "mixture": ("headway mixture 0.7 out_text_document 0.3 more_text_document",),
        "tokenizer": (),
        "tokenizer publish": ("headway tokenizer publish mine tokenizer/",),
    },
    "Runs and jobs": {
        "revalidate": (
            "headway revalidate tiny",
            "headway revalidate tiny --data new",
        ),
        "approve": (
            "headway approve",
            "headway approve 1a2b3c4d.deploy --approve --reason 'looked at the report'",
        ),
        "submit": ("headway submit hello.py --ranks 2",),
        "jobs": (
            "headway jobs",
            "headway jobs --all",
        ),
        "job": (),
        "job render": ("headway job render -c tiny -c slurm",),
        "job show": ("headway job show train-1a2b3c4d",),
        "job cancel": ("headway job cancel train-1a2b3c4d --reason 'wrong data'",),
        "job logs": ("headway job logs train-1a2b3c4d --follow",),
        "rehearse": ("headway rehearse --quick", "headway rehearse -c mine.yaml --only rank-killed"),
        "reconcile": ("headway reconcile",),
        "train-log": ("headway train-log train.log",),
    },
    "Models": {
        "models": (
            "headway models",
            "headway models tiny",
        ),
        "promote": ("headway promote model/tiny --reason 'better on new data'",),
        "rollback": ("headway rollback model/tiny --to 1a2b3c4d --reason 'slower answers'",),
        "lineage": (
            "headway lineage endpoint/tiny",
            "headway lineage dataset/mine --forward",
        ),
        "artifacts": (
            "headway artifacts",
            "headway artifacts dataset/mine --history",
        ),
        "verify": ("headway verify model/tiny",),
        "diff": ("headway diff model/tiny@1a2b3c4d model/tiny",),
        "copy": ("headway copy model/tiny --to ./team-c",),
        "model": (),
        "model push": ("headway model push model/tiny hf://team/tiny",),
        "prune": ("headway prune --keep 2",),
        "backup": (
            "headway backup --to ./backups",
            "headway backup --drill --to ./backups",
        ),
        "restore": ("headway restore --from ./backups",),
        "checkpoint": (),
        "checkpoint publish": (
            "headway checkpoint publish base folder/",
            "headway checkpoint publish smollm hf://HuggingFaceTB/SmolLM2-135M@main",
        ),
    },
    "Endpoints": {
        "endpoint": (),
        "endpoint render": ("headway endpoint render tiny -c tiny -c azureml",),
        "endpoint list": ("headway endpoint list",),
        "endpoint stop": ("headway endpoint stop tiny",),
        "endpoint key": (),
        "endpoint key add": ("headway endpoint key add tiny --caller ada",),
        "endpoint key list": ("headway endpoint key list tiny",),
        "endpoint key revoke": ("headway endpoint key revoke tiny ada",),
        "watch": ("headway watch tiny",),
    },
    "Platform": {
        "up": (
            "headway up --detach",
            "headway up --config platform.yaml",
        ),
        "status": ("headway status",),
        "down": ("headway down",),
        "run": ("headway run retrain/tiny",),
        "deployments": (
            "headway deployments",
            "headway deployments --prefect-yaml > prefect.yaml",
        ),
        "events": ("headway events",),
        "events send": ("headway events send dataset.published dataset/mine --reason 'by hand'",),
        "notify": (),
        "notify test": ("headway notify test",),
        "estate": (),
        "estate render": ("headway estate render -c estate.yaml --to estate",),
        "estate connect": ("headway estate connect outputs.json --to settings",),
        "estate audit": (
            "headway estate audit --collect > collect.sh",
            "headway estate audit estate-export --settings estate.yaml --html audit.html",
        ),
    },
    "Machines and money": {
        "qualify": ("headway qualify -c tiny",),
        "hardware": (
            "headway hardware",
            "headway hardware Standard_ND96isr_H100_v5",
        ),
        "plan": ("headway plan --case gpt3-175b",),
        "simulate": ("headway simulate --case gpt3-175b",),
        "prices": ("headway prices",),
        "quota": ("headway quota",),
        "cost": ("headway cost",),
        "rightsize": ("headway rightsize",),
        "scaling": ("headway scaling",),
        "seeds": ("headway seeds",),
    },
    "Security": {
        "sign": ("headway sign model/tiny --reason 'a new key'",),
        "trust": (),
        "trust list": ("headway trust list",),
        "trust add": ("headway trust add team-b team-b.pem --may-sign 'model/*'",),
        "trust revoke": ("headway trust revoke team-b --reason 'its key was lost'",),
        "person": (),
        "person add": ("headway person add ada --may run,approve",),
        "person renew": ("headway person renew ada",),
        "person remove": ("headway person remove ada",),
        "person list": ("headway person list",),
        "audit-log": (
            "headway audit-log",
            "headway audit-log --verify",
        ),
    },
}
"""The headings of the help texts; below each its commands in their order, with whole command lines as examples."""
EXAMPLES = {words: examples for panel in PANELS.values() for words, examples in panel.items()}


class Commands(Mapping[str, Any]):
    """The commands of one group by their last word, each imported when it is asked for."""

    def __init__(self, group: str) -> None:
        self.rows = {words.rpartition(" ")[2]: words for words in COMMANDS if words.rpartition(" ")[0] == group}

    def __getitem__(self, word: str) -> Any:
        words = self.rows[word]
        module, _, name = COMMANDS[words].function.partition(":")
        function: Any = getattr(importlib.import_module(f"deployments.cli.{module}"), name) if module else None
        examples = EXAMPLES.get(words)
        epilog = "\n  ".join(("\b\nExamples:", *examples)) if examples else None  # \b: its lines are not rewrapped
        if not Commands(words):
            app = typer.Typer(rich_markup_mode=None, add_completion=False)
            app.command(word, epilog=epilog)(function)
            return typer.main.get_command(app)
        app = typer.Typer(
            name=words,
            cls=CommandGroup,
            help=COMMANDS[words].summary,
            epilog=epilog,
            no_args_is_help=not function,
            invoke_without_command=bool(function),
            rich_markup_mode=None,
        )
        if function:
            app.callback()(function)
        return typer.main.get_group(app)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class CommandGroup(TyperGroup):
    """The group of the table's commands whose words begin with its name; the empty name is that of `headway` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(MutableMapping[str, Any], Commands(self.name or ""))

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands' words, without an import of any."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summaries by panel, without an import of what they are of."""
        rows = cast(Commands, self.commands).rows
        column = max(map(len, rows))
        for title, panel in PANELS.items():
            commands = [(words.rpartition(" ")[2], words) for words in panel if words in rows.values()]
            if commands:
                with formatter.section(title if not self.name else "Commands"):
                    width = formatter.width - column - 4  # the indent, and two spaces between the columns
                    formatter.write_dl(
                        [(f"{word:<{column}}", clause(COMMANDS[words].summary, width)) for word, words in commands]
                    )

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command's word by the table, without an import of any."""
        rows = cast(Commands, self.commands).rows
        self.commands = {word: TyperCommand(word, help=COMMANDS[words].summary) for word, words in rows.items()}
        return super().shell_complete(ctx, incomplete)


def clause(summary: str, width: int) -> str:
    """As much of a sentence as fits into a line: all of it, or up to a colon or semicolon, or else up to the last comma."""
    if len(summary) <= width:
        return summary
    ends = [summary.rfind(marks, 0, width) for marks in (";", ":", ",")]
    end = next((one for one in ends if one > 0), -1)
    return f"{summary[:end]}." if end > 0 else textwrap.shorten(summary, width, placeholder=" ...")
