"""The process that looks on: dead flow runs, schedules, alerts, telemetry. Its loop is __main__.py. See docs/monitoring.md."""
