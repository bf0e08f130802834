"""The page to try a model, in a real browser: without a key, with one, and what it looks like."""

import json
from pathlib import Path

import browser
import pytest
from api_stand import serving

from tasks.serving.keys import add_key, keys_file

SCRIPT = Path(__file__).parents[4] / "support" / "try_page.mjs"


@pytest.mark.skipif(browser.chromium() is None, reason="no Chromium on this machine")
def test_a_person_tries_the_model_in_a_browser(model, golden, tmp_path):
    entry = golden[2]
    assert entry["prompt"] == "class "
    _, key = add_key(tmp_path, "person")
    with serving(tmp_path / "server", model, keys=str(keys_file(tmp_path))) as server:
        seen = json.loads(browser.run(SCRIPT, server.url, key, tmp_path / "page.png"))
    assert seen["model"] == "model/tiny"
    assert "API key" in seen["refused"]["said"]
    assert seen["problems"] == []
    # A browser shows a text's line ends and NUL as HTML does.
    assert seen["answered"]["said"].replace("\0", "") == (entry["prompt"] + entry["completion"]).replace("\0", "")
    assert seen["answered"]["told"].startswith(f"{len(entry['tokens'])} tokens in ")
    assert (tmp_path / "page.png").stat().st_size > 5_000
