"""Runs a Strategy for real: Hugging Face models on PyTorch's own distributed engine, and measures what it costs.

run           the entry of every rank: from a run file and a strategy to a run folder
mesh          the grid of ranks
model         a model without memory, and how it gets its values
parallelize   the one recipe: levers and axes in order, and the proof that they took
data/         from a file of conversations to the tensors of a micro-batch
step          one optimizer step
loop          all of them: evaluation, logs, checkpoints, stopping and going on
meter/        what a step costs in bytes, messages and seconds
sentinels     what must hold, and does so silently wrong elsewhere
checkpoint/, weights, export    what is read and written
"""
