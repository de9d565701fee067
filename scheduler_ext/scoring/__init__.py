"""What every node would cost a pod: choice of cards, policies, typical pods, quotas."""
