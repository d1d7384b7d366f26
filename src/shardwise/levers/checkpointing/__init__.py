"""Activation checkpointing: keep less, compute again."""
