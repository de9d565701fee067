"""A cluster on one machine, from a checkout only: stand-ins for API server, kubelet, scheduler, runtime; the demo."""
