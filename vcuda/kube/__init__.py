"""Kubernetes' API, as both daemons use it: one login, one client, one informer, one way to keep threads alive.

May import `vcuda.spec` only. `aio` alone needs httptools: the node daemon never imports it.
"""
