"""Which devices the processes of a control group may open, and opening one again: version 1 by its lists, version 2 by its programs."""
