"""The stand-in kubelet: device plugins, PodResources and /pods as the real one offers them; pods as processes."""
