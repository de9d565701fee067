"""The admission webhook: what a pod, or a claim, that asks for a share may say, before it is ever pending."""
