"""shardwise: measure the cards and the wire, plan how to split a fine-tune, run it, and verify the prediction."""

__version__ = "0.1.0"
