"""A role policy for tests that run commands: persons, their rights and tokens."""

import json
import subprocess
import sys


def policy_of(home, tmp_path, *persons):
    """A role policy with these persons and their rights; returns its path and their tokens."""
    path, tokens = tmp_path / "policy.yaml", {}
    code = (
        "import json, sys; from pathlib import Path; from tasks.security.policy import add_person\n"
        "print(json.dumps({n: add_person(Path(sys.argv[1]), n, tuple(m)) for n, m in json.loads(sys.argv[2])}))"
    )
    environment = home.environment() | {"HEADWAY_POLICY": str(path)}
    path.write_text("persons: {}\n")
    path.chmod(0o600)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(home.path), json.dumps(persons)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    tokens = json.loads(ran.stdout)
    return path, tokens
