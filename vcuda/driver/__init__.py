"""The machine's NVIDIA driver: where its files are, as the host sees them, and what NVML says of cards.

Nothing of Kubernetes.
"""
