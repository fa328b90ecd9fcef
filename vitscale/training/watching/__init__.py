"""What watches a run from inside: preflight, lost ranks, wrong numbers, replicas and audits."""
