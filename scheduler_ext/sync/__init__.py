"""The traffic with the API server: watches in, Bindings out, and the lease that says who may write."""
