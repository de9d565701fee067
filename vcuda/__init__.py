"""GPU shares: the vocabulary (`vcuda.spec`), the interposer and its Python face, the simulated driver.

Nothing here may import `manager`, `scheduler_ext` or `deploy`; `vcuda.spec` imports nothing else of ours.
"""

__version__ = "0.1.0"
