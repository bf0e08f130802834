"""Facts about hardware, as data: baselines that a cluster must reach."""
