"""What an endpoint and its gateway agree on: routes, the shared secret, and who judges a rollout."""
