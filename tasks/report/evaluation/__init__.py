"""The part of a run's page about its evaluation."""
