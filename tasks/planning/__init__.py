"""A training run's size, time and failures by formula; pure."""
