"""The scheduler extender. May import `vcuda.spec` and `vcuda.kube` only (and the version)."""

from __future__ import annotations

import vcuda

__version__ = vcuda.__version__
