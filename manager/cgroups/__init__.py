"""Which devices a control group's processes may open, and opening one again: by lists (version 1) or programs (2)."""
