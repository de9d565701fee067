"""What a container is given: the driver directory, device nodes, mounts, environment, CDI."""
