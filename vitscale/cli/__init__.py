"""The commands: arguments in, text and exit codes out; the work is done by the rooms below."""
