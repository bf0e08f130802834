"""A role policy for tests that run commands: persons, their rights and tokens."""

import pytest

from tasks.security.policy import add_person


def policy_of(home, tmp_path, *persons):
    """A role policy with these persons and their rights; returns its path and their tokens."""
    path = tmp_path / "policy.yaml"
    path.write_text("persons: {}\n")
    path.chmod(0o600)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HEADWAY_POLICY", str(path))
        return path, {name: add_person(home.path, name, tuple(may)) for name, may in persons}
