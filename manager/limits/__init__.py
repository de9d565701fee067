"""Limits of memory that NVIDIA's driver itself holds: set on pods' control groups before they start, and kept."""
