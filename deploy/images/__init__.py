"""The image of both programs: Dockerfile for a container engine, or an OCI archive made by `python -m deploy.images` without one."""
