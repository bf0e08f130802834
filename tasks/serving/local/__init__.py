"""Endpoints on this machine: servers under a gateway."""
