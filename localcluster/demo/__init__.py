"""The demonstration: example pods on simulated cards, what they really use, and whether every limit held."""
