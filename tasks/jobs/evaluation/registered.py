"""The suites that there are, by the names that rules and metrics use, in the order in which they run."""

from __future__ import annotations

from tasks.jobs.evaluation.code_suite import code
from tasks.jobs.evaluation.labelled import labelled
from tasks.jobs.evaluation.leakage import leakage, toxicity
from tasks.jobs.evaluation.lm_eval_suite import lm_eval
from tasks.jobs.evaluation.memorisation import memorisation
from tasks.jobs.evaluation.suites import Measure

SUITES: dict[str, Measure] = {
    "memorisation": memorisation,
    "leakage": leakage,
    "toxicity": toxicity,
    "code": code,
    "labelled": labelled,
    "lm_eval": lm_eval,
}
