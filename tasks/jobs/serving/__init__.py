"""What a server of a model is made of; the program is tasks/jobs/serve.py, the gateway before several tasks/jobs/gateway.py."""
