"""Kubelet's two gRPC protocols: the .proto files are ours, the modules beside them are generated (generate.py)."""
