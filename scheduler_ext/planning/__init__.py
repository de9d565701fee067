"""Answers that take long, worked out on copies of the state: explanations, victims, defragmentation."""
