"""Kubelet's two gRPC protocols: the .proto files are written here, the modules beside them are generated (generate.py)."""
