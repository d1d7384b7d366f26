"""Start the ranks of a run on an existing engine, or join the ones that a launcher has started.

environment   what a launcher has put into the environment: torchrun, PET_*, Slurm
local         start ranks on this machine through torch's elastic launcher, and bring their errors back
"""
