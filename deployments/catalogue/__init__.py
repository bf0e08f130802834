"""What is deployed: every flow with every shipped configuration, and what events start."""
