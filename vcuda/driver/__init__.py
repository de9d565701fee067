"""The machine's NVIDIA driver: where its files are, as the host sees them. Nothing of Kubernetes."""
