"""The script that `headway estate audit --collect` prints, run by Bash with an `az` that answers from files."""

import json
import subprocess

import pytest

from tasks.report.estate.exports import read_exports, script

pytestmark = pytest.mark.integration
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
STORAGE = "Microsoft.Storage/storageAccounts"


def page(rows, token, total):
    return {"count": len(rows), "data": rows, "skip_token": token, "total_records": total}


def test_pages_are_followed_and_what_azure_refuses_is_said(tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    base = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/a (b)/providers/{STORAGE}"
    rows = [{"id": f"{base}/account{at}", "type": STORAGE.lower(), "properties": {}} for at in range(30)]
    (answers / "first").write_text(json.dumps(page(rows[:20], "next", 30)))
    (answers / "second").write_text(json.dumps(page(rows[20:], None, 30)))
    (answers / "none").write_text(json.dumps(page([], None, 0)))
    (answers / "ids").write_text("".join(f"{row['id']}\n" for row in rows))
    (answers / "empty").write_text('{"value": []}')
    program = tmp_path / "bin" / "az"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\ncd {answers}\ncase "$*" in\n"account show"*) echo {SUBSCRIPTION} ;;\n"graph query"*next*) cat second ;;\n'
        '"graph query -q resources"*) cat first ;;\n"graph query"*) cat none ;;\n"resource list"*storageAccounts*) cat ids ;;\n'
        '"resource list"*) ;;\n"rest"*/containers*|"rest"*budgets*) cat empty ;;\n"rest"*) echo refused >&2; exit 1 ;;\nesac\n'
    )
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script()], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
    export = read_exports([tmp_path / "estate-export"])
    assert len(list(export.having([STORAGE]))) == 30
    assert {"resources", "containers", "budgets", "computes", "roles"} <= export.complete
    assert "blob-services" not in export.complete
    assert any("did not answer blob-services" in one for one in export.notes)
