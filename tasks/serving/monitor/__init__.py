"""What endpoints kept of their answers, as numbers: read, labels joined, told over time. Judging is
tasks/serving/monitor/anomalies.py."""
