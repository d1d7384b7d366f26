"""Prediction beside measurement.

ledger.py    joins a Plan and what a run's meter measured, term by term
trials.py    a run file from its first word to its ledger: plan, launch, measure, compare
"""
