"""Predicts what a recipe will need on given hardware, before anything runs."""
