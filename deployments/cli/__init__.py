"""The `headway` command: one file a command group. Heavy imports happen inside the commands that need them."""
