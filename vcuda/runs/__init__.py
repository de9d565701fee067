"""`vcuda run`: shares for process trees on one machine, booked in a ledger that all its users see.

No Kubernetes, no daemon, no root. May import `vcuda.spec`, `vcuda.region` and `vcuda.arbiter`; knows nothing of the
simulated driver: its folders and its environment are handed in. docs/vcuda-run.md says what is promised.
"""
