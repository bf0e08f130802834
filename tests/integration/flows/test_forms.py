"""The forms in Prefect's page, and what a flow says to a configuration that does not fit: no server is needed for either."""

import pytest
from caused import make_batch
from prefect.utilities.callables import parameter_schema

from deployments.catalogue.flows import FORMS, parameters
from flows.backup import backup
from flows.qualify import qualify
from flows.retrain import retrain
from flows.revalidate import revalidate
from flows.support.inputs import checked
from flows.validate import validate
from tasks.common.errors import Unknown
from tasks.config.flows import STAGES, RetrainConfig

FLOWS = {"retrain": retrain, "revalidate": revalidate, "validate": validate, "qualify": qualify, "backup": backup}


@pytest.mark.parametrize("name", FLOWS)
def test_every_field_of_a_form_has_a_help_text_and_a_default(name):
    schema = parameter_schema(FLOWS[name]).model_dump_for_openapi()
    assert all(field["description"] for field in schema["properties"].values())
    fields = [
        (kind, key, field) for kind, made in schema["definitions"].items() for key, field in made["properties"].items()
    ]
    assert len(fields) >= 3
    sections = {kind: made["description"] for kind, made in schema["definitions"].items()}
    for kind, key, field in fields:
        section = field.get("$ref", "").rpartition("/")[2]
        assert field.get("description") or sections[section], f"{kind}.{key}"
        assert "default" in field, f"{kind}.{key}"
    config = schema["properties"]["config"]["$ref"].rpartition("/")[2]
    assert config == FORMS[name].__name__


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
        FLOWS[name].fn(strange, parameters(name, "tiny")["config"], cause=cause)
    assert not (tmp_path / "runs").exists()
