"""What the daemon shows: the picture of the node, metrics, HTTP pages, the node object."""
