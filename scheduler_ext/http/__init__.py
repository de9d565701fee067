"""What kube-scheduler and people reach over HTTP: the routes and the TLS certificate."""
