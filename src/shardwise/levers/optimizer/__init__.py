"""What the optimizer keeps and how long its step takes."""
