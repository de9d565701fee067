"""This node's cards behind an interface: probed, watched, with their MIG instances and device nodes."""
