"""Dtypes of weights, compute and the wire."""
