"""The scheduler extender. May import vcuda.spec only."""
