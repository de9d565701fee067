"""The daemon's own process: log lines, systemd's readiness, one daemon per node."""
