"""A cluster on one machine, from a checkout only: stand-in API server, kubelet, scheduler and container runtime, and the demo."""
