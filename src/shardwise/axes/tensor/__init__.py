"""Tensor parallelism: every matrix split over the cards of one node."""
