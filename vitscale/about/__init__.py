"""What is said about runs: plans, state, studies, checks, reports. Only commands and the Python face use it."""
