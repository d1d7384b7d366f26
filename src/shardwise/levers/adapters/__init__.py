"""LoRA and QLoRA: train low-rank adapters on frozen weights."""
