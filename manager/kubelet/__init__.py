"""What kubelet knows: its pods, its records of devices, and the names that it gives devices."""
