"""What is true of the world: cards, links and models as YAML, every value with its unit, source and date."""
