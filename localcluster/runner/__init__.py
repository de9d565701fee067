"""Pods' containers as local processes: real mounts in namespaces where the machine allows, else host paths."""
