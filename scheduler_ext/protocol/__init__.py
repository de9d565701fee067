"""Other programs' words: the extender protocol, reason codes, Kubernetes quantities; imports nothing of ours but the vocabulary."""
