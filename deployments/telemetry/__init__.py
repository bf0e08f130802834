"""Run folders and the host, turned into OpenTelemetry. Flows and jobs know nothing of it. See docs/monitoring.md."""
