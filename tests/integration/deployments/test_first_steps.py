"""`headway init`, then `headway retrain` with the file that it wrote."""

import subprocess
import sys

from support import publish_tiny


def test_what_init_writes_is_what_retrain_takes(fresh):
    publish_tiny(fresh)
    file = fresh.path.parent / "mine.yaml"
    made = fresh.ok("init", file, "--data", "tiny", "--size", "tiny").said
    assert made["next"] == [f"headway retrain -c {file} --dry-run", f"headway retrain -c {file}"]
    planned = fresh.ok("retrain", "-c", file, "--dry-run").said
    assert planned["dataset"].startswith("dataset/tiny@")
    assert [stage["status"] for stage in planned["stages"]] == ["pending"] * 8


def test_headway_alone_imports_nothing_slow(tmp_path):
    code = (
        "import sys; from deployments.cli.main import app\n"
        "try: app([])\n"
        "finally: print([name for name in ('yaml', 'rich', 'prefect', 'mlflow') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "Next:" in ran.stdout and ran.stdout.rstrip().endswith("[]"), ran.stdout + ran.stderr
