"""Only who asked may say whether the answer was right: a real server, its edge, and two keys."""

import pytest
from api_stand import serving

from tasks.serving.keys import add_key, keys_file
from tasks.serving.monitor.measures import read


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder with the keys of two callers, and the headers that each sends."""
    folder = tmp_path_factory.mktemp("keys")
    return folder, {
        caller: {"Authorization": f"Bearer {add_key(folder, caller)[1]}"} for caller in ("tickets", "search")
    }


@pytest.mark.long
def test_a_label_needs_the_key_that_the_request_was_asked_with(model, keys, tmp_path):
    folder, headers = keys
    with serving(tmp_path / "server", model, keys=str(keys_file(folder))) as server:

        def label(request, **how):
            body = {"request_id": request, "label": "right"}
            return server.client.post("/v1/feedback", json=body, **how).status_code

        asked = {"prompt": "def ", "max_tokens": 4}
        said = server.client.post("/v1/completions", json=asked, headers=headers["tickets"])
        request = said.headers["X-Request-Id"]
        assert said.json()["id"] == request
        assert label(request) == 401
        assert label(request, headers=headers["search"]) == 404
        forged = {**headers["search"], "X-Headway-Caller": "tickets"}
        assert label(request, headers=forged) == 404
        assert label(request, headers=headers["tickets"]) == 200
    (kept,) = read(tmp_path / "server" / "outputs" / "model").labels
    assert (kept.id, kept.caller, kept.right) == (request, "tickets", 1.0)
