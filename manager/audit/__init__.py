"""What is looked at again and again: who holds the cards, against what we gave."""
