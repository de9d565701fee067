"""Other programs' words: the extender protocol and reason codes; imports nothing of ours but the vocabulary."""
