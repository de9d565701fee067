"""This node's cards behind an interface: probed, watched, missed when gone; their MIG instances and device nodes."""
