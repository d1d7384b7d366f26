"""The nouns that every room speaks. Standard library only; frozen keyword-only dataclasses; units in the names."""
