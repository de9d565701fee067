"""The admission webhook: what a pod that asks for a share may say, before it is ever pending."""
