"""Dynamic Resource Allocation: claims that kubelet has prepared, the cards as ResourceSlices, registration, health."""
