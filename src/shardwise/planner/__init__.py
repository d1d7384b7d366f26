"""Arithmetic in milliseconds, without torch: memory, time and wire of every strategy, the one to take, and why.

memory.py    all terms of one strategy on one rank
compute.py   seconds of a block, the loss and the optimizer on one card
wire.py      seconds of a collective on a group of cards
timeline.py  one optimizer step on lanes
headline.py  the same questions on the back of an envelope
search.py    all strategies, refused or priced, ranked
rules.py     the decision rules and the choice
answer.py    the Plan, with everything that is said about it
advice.py    what would make it fit, whether more cards help
learning_rate.py  what another batch asks of it
explain.py   the arithmetic with the user's own numbers, line by line
"""
