"""What is known, as plain data: nodes and cards, pods and what they book, gangs, nominations, decisions."""
