"""The forms in Prefect's page, and what a flow says to a configuration that does not fit: no server is needed for either."""

import inspect

import pytest
from caused import make_batch
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate as validate_against_schema

from deployments.catalogue.flows import FORMS, catalogue, parameters
from deployments.configuration.platform import PlatformConfig
from flows.backup import backup
from flows.qualify import qualify
from flows.retrain import retrain
from flows.revalidate import revalidate
from flows.support.inputs import checked, configured
from flows.validate import validate
from tasks.common.errors import Unknown
from tasks.config.files import load
from tasks.config.flows import STAGES, RetrainConfig, RevalidateConfig

FLOWS = {"retrain": retrain, "revalidate": revalidate, "validate": validate, "qualify": qualify, "backup": backup}


@pytest.mark.parametrize("name", FLOWS)
def test_every_field_of_a_form_has_a_help_text_and_a_default(name):
    schema = parameter_schema(FLOWS[name]).model_dump_for_openapi()
    assert all(field["description"] for field in schema["properties"].values())
    assert set(schema.get("required", ())) <= {"dataset", "config"} and len(schema["properties"]) <= 12
    for kind, made in schema.get("definitions", {}).items():
        for key, field in made["properties"].items():
            assert field["description"] and "default" in field, f"{kind}.{key}"


@pytest.mark.parametrize("name", FLOWS)
def test_a_form_that_is_sent_as_it_is_shown_is_what_the_deployment_says(name):
    """Prefect's page sends the default of every field along, and the server refuses one that its schema does not hold."""
    schema = parameter_schema(FLOWS[name]).model_dump_for_openapi()
    (deployment,) = (one for one in catalogue(PlatformConfig()) if one.full_name == f"{name}/tiny")
    shown = {key: field["default"] for key, field in schema["properties"].items() if "default" in field}
    sent = {**shown, **deployment.parameters}
    validate_against_schema(sent, schema)
    fields = {key: value for key, value in sent.items() if key in inspect.signature(configured).parameters}
    wanted = FORMS[name].model_validate(parameters(name, "tiny")["config"])
    assert configured(FORMS[name], fields.pop("config"), **fields) == wanted


def test_the_form_of_a_retraining_begins_with_what_people_change():
    names = list(parameter_schema(retrain).model_dump_for_openapi()["properties"])
    assert names[:7] == ["dataset", "preset", "learning_rate", "steps", "where", "cluster", "overrides"]


def test_what_is_named_nearer_to_the_run_counts():
    made = configured(
        RetrainConfig,
        {"training": {"seed": 3, "steps": 30}},
        "tiny",
        "ssh",
        ["training.steps=50"],
        learning_rate=0.01,
        steps=40,
    )
    wanted = load(["tiny", "ssh"], ["training.seed=3", "training.steps=50", "training.learning_rate=0.01"])
    assert made == wanted


@pytest.mark.parametrize(
    "fields", [{"preset": "slurm"}, {"where": "tiny"}, {"preset": "FILE"}, {"preset": "tiny", "where": "FILE"}]
)
def test_a_field_names_what_is_shipped_and_no_file_of_the_worker(fields, tmp_path):
    (tmp_path / "own.yaml").write_text("cluster: {backend: local}")
    named = {key: str(tmp_path / "own.yaml") if value == "FILE" else value for key, value in fields.items()}
    with pytest.raises(ValueError, match="no shipped configuration"):
        configured(RetrainConfig, {}, **named)


def test_what_an_earlier_release_wrote_counts_whatever_the_preset_says():
    whole = load("local", ["training.seed=5"])
    assert configured(RetrainConfig, whole.model_dump(mode="json"), "tiny") == whole == configured(RetrainConfig, whole)
    assert configured(RetrainConfig, {}, whole) == whole, (
        "the second argument, as the README of the release before had it"
    )
    asking = load("tiny", ["approval.before_deploy=true"])
    for earlier in (asking, asking.model_dump(mode="json")):
        assert configured(RetrainConfig, earlier, None) == asking  # what is null names nothing
    moved = configured(RetrainConfig, whole.model_dump(mode="json"), "tiny", "ssh")
    assert moved.cluster == load(["ssh"], []).cluster and moved.training == whole.training


def test_a_setting_that_the_preset_has_and_the_flow_has_not_is_taken_beside_settings_of_its_own():
    """A revalidation is of the model that `training.model` of its preset names."""
    named = {"overrides": ["training.model=foo", "evaluation.max_bytes=5000"]}
    for own in ({}, {"evaluation": {"min_documents": 3}}):
        made = configured(RevalidateConfig, own, "tiny", **named)
        assert (made.model, made.evaluation.max_bytes) == ("foo", 5000)


@pytest.mark.parametrize(("config", "overrides"), [("tiny", []), ([1], []), ({}, [3])])
def test_fields_of_another_kind_are_refused_in_words(config, overrides):
    with pytest.raises(ValueError, match="by section"):
        configured(RetrainConfig, config, "tiny", overrides=overrides)


@pytest.mark.parametrize(
    "override",
    ["training.learning_rat=1", "training.steps=0", "training", "training.steps.a=1", "training.seed=[", "flight=1"],
)
def test_an_override_is_refused_in_the_words_of_the_command_line(override):
    with pytest.raises(ValueError) as there:
        load("tiny", [override])
    with pytest.raises(ValueError) as here:
        configured(RetrainConfig, {}, "tiny", overrides=[override])
    assert str(here.value) == str(there.value)


def test_stages_are_choices():
    properties = parameter_schema(retrain).model_dump_for_openapi()["properties"]
    for key in ("from_stage", "to_stage"):
        assert properties[key]["anyOf"][0]["enum"] == list(STAGES)


@pytest.mark.parametrize("name", FLOWS)
def test_what_a_deployment_holds_fits_its_flow(name):
    checked(FORMS[name], parameters(name, "tiny")["config"])


def test_a_revalidation_is_of_the_model_that_the_retraining_makes():
    assert parameters("revalidate", "tiny")["config"]["model"] == "tiny"


@pytest.mark.parametrize(
    "config, words",
    [
        ({"training": {"learning_rat": 1}}, ("training.learning_rat", "headway up")),
        ({"training": {"steps": 0}}, ("training.steps", "greater than 0", "not 0")),
        ({"validation": {"text_field": "body"}}, ("validation.text_field 'body'",)),
    ],
)
def test_a_configuration_of_another_release_is_named_key_by_key(config, words):
    with pytest.raises(ValueError) as raised:
        checked(RetrainConfig, config)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("name", ["retrain", "revalidate"])
def test_events_about_a_dataset_that_is_not_there_are_no_failure_of_the_model(name, tmp_path, monkeypatch):
    """No run of ours begins, so no alert says that the retraining or revalidation of the model failed."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    strange = "dataset/nobody-made-this"
    cause = make_batch(tmp_path, "dataset.published", strange, dataset=strange)
    with pytest.raises(Unknown, match="nobody-made-this"):
        FLOWS[name].fn(strange, preset="tiny", cause=cause)
    assert not (tmp_path / "runs").exists()
