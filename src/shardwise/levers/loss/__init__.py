"""The loss over the vocabulary: plain, chunked or fused."""
