"""The parts of the gateway (tasks/jobs/gateway.py): who gets a request, the way there and back, and who stands ready."""
