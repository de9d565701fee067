"""The stand-in API server: the part of the Kubernetes API that the product and its users touch, in memory."""
