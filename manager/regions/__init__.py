"""Containers' regions as files: made, changed live and removed, on storage that a tenant can't fill."""
