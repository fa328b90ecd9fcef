"""Tells how a run is doing by its directory alone: while it trains, after it, or after what ended it. No torch."""

from vitscale.about.status.run import NoRunYetError, RunReader, RunStatus
