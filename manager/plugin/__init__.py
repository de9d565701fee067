"""The device plugin protocol: kubelet's calls, the device lists, registration."""
