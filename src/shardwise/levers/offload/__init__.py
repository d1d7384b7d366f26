"""Offload: weights, gradients and moments that wait in host memory."""
