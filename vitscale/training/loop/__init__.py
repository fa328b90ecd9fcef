"""The trainer's loop: updates, reports, saves, and how a run goes on from a checkpoint."""
