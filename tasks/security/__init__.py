"""Who may do what, who did it, and whose signatures count: policy, audit chain, access log, trust."""
