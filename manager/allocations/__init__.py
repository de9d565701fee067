"""What is allocated on this node: the record of one share, sums over them, and their file on disk."""
