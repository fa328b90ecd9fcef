"""Engines: run a conversion's tasks in this process, in worker processes of this machine, or on a Ray cluster."""
