"""The one-machine deployment: stand-in kubelet and API server, pods as processes. May import everything."""
