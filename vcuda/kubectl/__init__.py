"""`kubectl vcuda`: asks the API server, and through it our services; never a node directly.

It knows the vocabulary and the Kubernetes client alone.
"""
