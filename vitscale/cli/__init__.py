"""The commands: arguments in, text and exit codes out; other packages do the work."""
