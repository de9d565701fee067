"""The vocabulary that every part shares: names, units, requests, placements, fit rules, errors.

Pure Python, no I/O. Nothing of ours may be imported here; everything of ours may import this.
"""
