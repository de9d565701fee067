"""Recordings, replays and simulations of the engine; nothing that decides imports it."""
