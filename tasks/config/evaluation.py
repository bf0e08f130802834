"""What a model is measured on, and what it must reach, as settings.

What measures is tasks/jobs/evaluate.py; who judges, tasks/evaluate.py. A field's docstring is its help text, in
docs/configuration.md.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.config.base import Positive, Settings

MetricName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
SHIPPED = "shipped"
"""What `evaluation.code.problems` says for the functions that Headway brings along."""


class CodeSuiteConfig(Settings):
    """Functions that the model is to complete, each run against the examples of its docstring in a sandbox."""

    problems: str = ""
    """`shipped`: 20 small Python functions. Else a dataset's reference, or an absolute path, of JSON lines with `name` and
    `prompt`. Empty: no code is written and none is run."""
    tokens: int = Field(128, gt=0, le=2048)
    """Most tokens of a completion."""
    seconds: Positive = 10
    """Of the clock, that one completion may run."""
    cpu_seconds: Positive = 5
    """Of CPU time, that one completion may use."""
    memory_mib: int = Field(512, ge=128)
    """Address space of one completion, in MiB."""
    allow_without_namespaces: bool = False
    """Run completions even where there is no bubblewrap, or no namespaces: as another user (which only root can do), with limits,
    but with the network and the sight of files. Otherwise the stage ends there."""


class LabelledFile(Settings):
    """Texts with the right label: accuracy and F1 by the label that the model finds the most likely continuation."""

    name: MetricName = "labelled"
    """What its metrics begin with: `labelled.NAME_accuracy`."""
    file: str = ""
    """A dataset's reference, or an absolute path, of JSON lines with `text` and `label`."""
    prompt: str = "{text}\nLabel:"
    """Text before the label, with `{text}` in it once. A space and the label follow."""

    @model_validator(mode="after")
    def _can_be_read(self) -> LabelledFile:
        if not self.file:
            raise ValueError(
                f"the labelled file {self.name} is not named: set evaluation.labelled[].file to a dataset or a path"
            )
        if self.prompt.count("{text}") != 1:
            raise ValueError(f"evaluation.labelled[].prompt = {self.prompt!r}: write {{text}} in it, once")
        return self


class LmEvalConfig(Settings):
    """Tasks of lm-evaluation-harness, by name, with their data given as files: nothing is loaded from a hub."""

    tasks: tuple[str, ...] = ()
    """Names of tasks. Empty: none are run."""
    data: str = ""
    """A dataset's reference, or an absolute path of a folder: `TASK.SPLIT.jsonl` for a task that the harness knows, or a task's
    own YAML, whose data files are named relative to it."""
    limit: int = Field(0, ge=0)
    """Most samples of each task. 0: all."""

    @model_validator(mode="after")
    def _has_data(self) -> LmEvalConfig:
        if self.tasks and not self.data:
            raise ValueError(
                f"evaluation.lm_eval.tasks names {self.tasks[0]}, and no data: set evaluation.lm_eval.data"
            )
        return self


class PromptFile(Settings):
    """Prompts with a rule each, which the model's answer must keep; asked by its chat template, as clients ask it by chat."""

    name: MetricName = "prompts"
    """What its metrics begin with: `prompts.NAME_share`."""
    file: str = ""
    """A dataset's reference, or an absolute path, of JSON lines: `text` (with `system`, where there is one) or `messages`, and a
    rule: `exact`, `regex`, `json_schema` or `examples`."""
    tokens: int = Field(256, gt=0, le=4096)
    """Most tokens of an answer. One that does not end by then is judged as it stands."""
    samples: int = Field(0, ge=0, le=64)
    """Answers to each prompt that are drawn from the whole distribution, beside the most likely one: `NAME_pass_at_K` is
    the share of prompts of which one of the K keeps the rule, `NAME_mean_at_K` that of all answers. 0: none are drawn."""

    @model_validator(mode="after")
    def _can_be_read(self) -> PromptFile:
        if not self.file:
            raise ValueError(
                f"the prompts {self.name} have no file: set evaluation.prompts[].file to a dataset or a path"
            )
        return self


class EvaluationConfig(Settings):
    """What the model is measured on."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and products. bf16 takes half the memory; its scores are others, and a champion is measured again with it."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: the machine's first GPU where it has one, else the CPU. `cpu`: always the CPU, as where no GPU has room."""
    max_bytes: Positive = 1_000_000
    """Held-out text that is read, in bytes, whole documents in a fixed order; as much of each corpus of a mixture."""
    min_documents: Positive = 5
    """Fewest held-out documents that a verdict may rest on."""
    min_slice_documents: Positive = 10
    """Fewest documents of a slice that get an interval and may be judged; with fewer it is `insufficient`."""
    bootstrap_samples: Positive = 1000
    """Times that the held-out documents are drawn again, with replacement."""
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """Of the bootstrap interval."""
    seed: int = Field(1234, ge=0)
    """Of the bootstrap's draws, and of the probes' samples."""
    probe_samples: int = Field(16, ge=0, le=4096)
    """Passages that are continued to look for training text learned by heart, and texts that are written to look for secrets,
    personal data and listed words. 0: nothing is generated."""
    probe_prefix_tokens: int = Field(24, gt=0, le=1024)
    """Tokens of a passage that the model is given."""
    probe_tokens: int = Field(24, gt=0, le=1024)
    """Tokens that it then writes: all must be those of the passage to count as learned by heart."""
    toxic_words: str = ""
    """Reference of a dataset of words, one a line, that a text which the model writes should not hold. Empty: not looked for."""
    suite_seconds: Positive = 900
    """Longest time that one suite may take. One that takes longer has no metrics, and closes a gate that asks for one."""

    code: CodeSuiteConfig = CodeSuiteConfig()
    """Does what the model writes parse, and does it run?"""
    labelled: tuple[LabelledFile, ...] = ()
    """Texts with labels."""
    lm_eval: LmEvalConfig = LmEvalConfig()
    """Tasks of lm-evaluation-harness."""
    prompts: tuple[PromptFile, ...] = Field((), exclude_if=lambda files: not files)
    """Prompts of your own, with rules."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationConfig:
        for setting, files in (("labelled", self.labelled), ("prompts", self.prompts)):
            names = sorted(each.name for each in files)
            if len(set(names)) < len(names):
                raise ValueError(
                    f"evaluation.{setting} has two files of one name ({', '.join(names)}): name each another way"
                )
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """References of the datasets that suites read, each once: the stage hands them to the job as `files-NAME`."""
        return tuple(name for name in self._named if not name.startswith("/"))

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and folders that suites read by their whole paths, each once."""
        return tuple(name for name in self._named if name.startswith("/"))

    @property
    def _named(self) -> tuple[str, ...]:
        files = (*(each.file for each in self.labelled), *(each.file for each in self.prompts))
        named = (self.toxic_words, self.code.problems, self.lm_eval.data, *files)
        return tuple(dict.fromkeys(name for name in named if name and name != SHIPPED))


HELDOUT_METRICS = ("bits_per_byte", "perplexity", "accuracy", "calibration_error", "gain_over_bigram")
"""What every evaluation measures on held-out text."""


def prompt_metrics(samples: int) -> tuple[str, ...]:
    """What is measured of each file of prompts, of which so many further answers are drawn."""
    drawn = (f"pass_at_{samples}", f"mean_at_{samples}") if samples else ()
    return ("count", "share", "low", "high", *drawn)


def suite_metrics(config: EvaluationConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of each suite: the setting that asks for it where `config` does not (else empty), and patterns of its metrics."""
    shares = {
        "memorisation": ("train", "heldout"),
        "leakage": ("secret", "personal"),
        "toxicity": ("toxic",),
        "code": ("parse", "pass"),
    }
    probes = "" if config.probe_samples else "evaluation.probe_samples"
    missing = {
        "memorisation": probes,
        "leakage": probes,
        "toxicity": probes or ("" if config.toxic_words else "evaluation.toxic_words"),
        "code": "" if config.code.problems else "evaluation.code.problems",
        "labelled": "" if config.labelled else "evaluation.labelled",
        "lm_eval": "" if config.lm_eval.tasks else "evaluation.lm_eval.tasks",
        "prompts": "" if config.prompts else "evaluation.prompts",
    }
    patterns = {
        suite: tuple(f"{name}_{part}" for name in names for part in ("count", "share", "low", "high"))
        for suite, names in shares.items()
    }
    patterns["memorisation"] += ("excess",)
    patterns["labelled"] = tuple(f"{file.name}_*" for file in config.labelled)
    patterns["prompts"] = tuple(
        f"{file.name}_{part}" for file in config.prompts for part in prompt_metrics(file.samples)
    )
    patterns["lm_eval"] = ("*",)  # a group of tasks has metrics of tasks that only the harness knows
    return {suite: (missing[suite], patterns[suite]) for suite in missing}


def require_measured(rules: tuple[GateRule, ...], config: EvaluationConfig) -> None:
    """Raise ValueError for a rule about what `config` does not measure: it would close the gate after a whole training."""
    suites = suite_metrics(config)
    for rule in rules:
        known: tuple[str, ...]
        suite, _, _ = rule.metric.rpartition(".")
        if not suite:
            known, asked_by = HELDOUT_METRICS, ""
        elif suite in suites:
            asked_by, patterns = suites[suite]
            known = tuple(f"{suite}.{pattern}" for pattern in patterns)
        else:
            raise ValueError(
                f"comparison.rules names {rule.metric}, and there is no suite {suite!r}: there are {', '.join(suites)}"
            )
        if asked_by:
            raise ValueError(
                f"comparison.rules names {rule.metric}, and the suite {suite} is not measured: set {asked_by}, "
                "or leave the rule out"
            )
        if not any(fnmatchcase(rule.metric, each) for each in known):
            raise ValueError(
                f"comparison.rules names {rule.metric}, which nothing measures: there are {', '.join(known)}"
            )


BY_PROBLEM = ("code.parse_share", "code.pass_share", "labelled.*_accuracy", "prompts.*_share", "prompts.*_pass_at_*")
"""Metrics with a verdict on each problem."""


class GateRule(Settings):
    """What a metric must reach. A rule closes the gate as well when its metric is missing, no number, or of too few documents."""

    metric: str = ""
    """`bits_per_byte`, `perplexity`, `accuracy`, `calibration_error`, `gain_over_bigram`, or `SUITE.METRIC`."""
    at_least: float | None = None
    """Smallest value that passes."""
    at_most: float | None = None
    """Largest value that passes."""
    max_loss_to_champion: float | None = Field(None, gt=-1.0)
    """Largest share by which it may be worse than the champion's; the upper end of the interval counts where documents are
    paired. Under 0: it must be better by that share. Passes without a champion, and when the champion is this checkpoint."""
    min_gain: float | None = Field(None, gt=-1.0, lt=1.0, exclude_if=lambda gain: gain is None)
    """Least gain, for metrics with a verdict on each problem: the problems won less those lost, as a share of all. The low end
    of the interval counts, and must lie over it. 0: it must be better; -0.05: it may be worse by less than five in a hundred."""
    against: Literal["champion", "base"] = Field("champion", exclude_if=lambda model: model == "champion")
    """Whose answers `max_loss_to_champion` and `min_gain` are compared with: the champion's, or those of the base model of the
    training, which is measured too. Without a champion there is nothing to compare, and both pass."""
    slices: tuple[str, ...] = ()
    """Slices that the rule is about, each by itself: names, or patterns such as `script *`. Empty: all documents together."""
    min_documents: int = Field(0, ge=0)
    """Fewest documents, or samples of a suite, that it may rest on. 0: what `evaluation` says."""

    @model_validator(mode="after")
    def _asks_something(self) -> GateRule:
        if not self.metric:
            raise ValueError("a rule needs a metric: set comparison.rules[].metric, for example bits_per_byte")
        relative = (self.max_loss_to_champion, self.min_gain)
        if (self.at_least, self.at_most, *relative) == (None,) * 4:
            raise ValueError(
                f"the rule for {self.metric} has no limit: set at_least, at_most, max_loss_to_champion or min_gain, or leave it "
                "out"
            )
        if self.against == "base" and relative == (None, None):
            raise ValueError(
                f"the rule for {self.metric} is against the base model: set min_gain or max_loss_to_champion"
            )
        if self.min_gain is not None and not any(fnmatchcase(self.metric, each) for each in BY_PROBLEM):
            raise ValueError(
                f"{self.metric} has no verdict on each problem: set max_loss_to_champion instead of min_gain"
            )
        if self.slices and "." in self.metric:
            raise ValueError(f"{self.metric} is of a suite, and has no slices: leave `slices` out")
        return self


class ComparisonConfig(Settings):
    """What a model must reach to be exported, and to stay. Not in any stage's key: a new limit causes no new measurement."""

    min_gain_over_bigram: float = Field(0.10, ge=-1000.0, lt=1.0)
    """Share by which the model's bits per byte must lie under the Kneser-Ney bigram's. Of answers that are all of one form a
    bigram knows nearly all: there a low number, as -1000, leaves the verdict to other rules."""
    max_loss_to_champion: float = Field(0.02, ge=0.0)
    """Non-inferiority margin: the upper end of the interval of the relative loss to the champion must stay under it."""
    seed_noise: float | None = Field(None, ge=0.0, lt=1.0, exclude_if=lambda noise: noise is None)
    """Relative standard deviation of bits per byte of one recipe over seeds of training; widens the interval of the loss to the
    champion. Empty: not known, the interval is of documents alone."""
    max_loss_since_promotion: float = Field(0.10, ge=0.0)
    """Share by which a champion's bits per byte on the newest data may lie over those at its promotion; for revalidate."""
    rules: tuple[GateRule, ...] = ()
    """What else a model must reach. All must hold; revalidate does not look at them."""

    @property
    def against_base(self) -> bool:
        """Whether a rule asks for the base model's figures."""
        return any(rule.against == "base" for rule in self.rules)
