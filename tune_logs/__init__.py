"""Tuning records that ship with bnncc, as data."""
